"""Adam in one pass has the bits of Transformer Engine's Adam behind core's clipping: by itself, and
in training at the real width.

    python -m pytest -q -rA tests/gpu/test_gpu_one_pass.py
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.sharding import local_optimizer, one_pass_adam, tensor_table
from megatron_fsdp_adapter.sharding.adam_table import CHUNK
from tests.distributed.checks import Step, check_run_bits
from tests.distributed.gpt import Case, build_trainer, distributed_optimizer, init_megatron
from tests.gpu.gpu_ranks import Check, Outcomes
from tests.gpu.test_gpu_optimizer_offload import _local_run

pytest.importorskip("transformer_engine.pytorch")

SIZES = (1_000_003, 4096 * 33, 7, 65536 * 2 + 1, 1, CHUNK * 3)
FLOAT32, BF16 = torch.float32, torch.bfloat16
WIDE = Case(
    num_layers=2, hidden=4096, heads=32, ffn=11008, vocab=8192, seq=4096, batch=1, microbatches=1,
    bf16=True, swiglu=True, bias=False, recompute="full-1", clip=0.05,
)  # fmt: skip
LATE = {"fsdp_overlap_param_gather_with_optimizer_step": True}
DTYPES = [
    (FLOAT32, FLOAT32, FLOAT32), (BF16, FLOAT32, FLOAT32), (BF16, FLOAT32, BF16),
    (FLOAT32, BF16, FLOAT32), (BF16, BF16, BF16),
]  # fmt: skip
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _refuse(*arguments: Any) -> None:
    raise AssertionError("the kernel did not take these")


def _adam(original: Callable[..., Any] = _refuse) -> one_pass_adam.OnePassAdam:
    return one_pass_adam.OnePassAdam(original, one_pass_adam.kernel_of)


def _on_device(value: float, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
    return torch.full((1,), value, dtype=dtype, device="cuda")


def _scale(grads: list[torch.Tensor], factor: float | None) -> None:
    """In float32, as core's clipping."""
    for grad in grads:
        if factor is not None:
            grad.copy_((grad.float() * factor).to(grad.dtype))


def _copy(rows: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in row] for row in rows]


def _equal(rows: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    return all(all(map(torch.equal, row, other)) for row, other in zip(rows, others, strict=True))


def _tensors(
    grads: torch.dtype, weights: torch.dtype, moments: torch.dtype, sizes: tuple[int, ...],
    scale: float, skip: int,
) -> list[list[torch.Tensor]]:  # fmt: skip
    made = []
    for dtype, width in (
        (grads, 1e-3 * scale), (weights, 1.0), (moments, 1e-3 * scale), (moments, 1e-6 * scale**2)
    ):  # fmt: skip
        found = [(torch.randn(n + skip, device="cuda") * width).to(dtype)[skip:] for n in sizes]
        made.append(found)
    made[3] = [tensor.abs() for tensor in made[3]]
    return made


@NEEDS_GPU
@pytest.mark.parametrize(("grads", "weights", "moments"), DTYPES)
def test_bits_of_transformer_engine(
    grads: torch.dtype, weights: torch.dtype, moments: torch.dtype
) -> None:
    """Decoupled decay and the other, clipped and not, subnormal numbers, addresses that allow long
    reads and that do not, several steps."""
    import transformer_engine_torch as tex

    adam = _adam()
    overflow = torch.zeros(1, dtype=torch.int, device="cuda")
    even = (8192, 4096 * 64, 24)
    for mode, factor, scale, (sizes, skip) in itertools.product(
        (1, 0), (None, 0.37), (1.0, 1e-18), ((SIZES, 0), (even, 0), (even, 1))
    ):
        ours = _tensors(grads, weights, moments, sizes, scale, skip)
        theirs = _copy(ours)
        adam.clip = None if factor is None else torch.full((), factor, device="cuda")
        _scale(theirs[0], factor)
        for step in (1, 2, 7, 1000):
            rest = (3e-2, 0.9, 0.95, 1e-8, step, mode, 1, 0.1)
            adam(65536, overflow, ours, *rest)
            tex.multi_tensor_adam(65536, overflow, theirs, *rest)
            assert _equal(ours[1:], theirs[1:]), (mode, factor, scale, sizes, skip, step)


@NEEDS_GPU
@pytest.mark.parametrize(("grads", "weights", "moments"), DTYPES)
def test_a_capturable_update_has_the_bits_of_one_that_is_not(
    grads: torch.dtype, weights: torch.dtype, moments: torch.dtype
) -> None:
    """Of Transformer Engine's: learning rate and step on the device, `inv_scale` beside the clip.
    Gradients that `inv_scale` changes are written back, those of the clip are not."""
    import transformer_engine_torch as tex

    adam, overflow = _adam(), _on_device(0, torch.int32)
    for mode, factor, inv_scale, sizes in itertools.product(
        (1, 0), (None, 0.37), (1.0, 0.25), (SIZES, (8192, 4096 * 64, 24))
    ):
        ours = _tensors(grads, weights, moments, sizes, 1.0, 0)
        theirs, before = _copy(ours), _copy(ours[:1])
        adam.clip = None if factor is None else _on_device(factor)
        _scale(theirs[0], factor)
        _scale(theirs[0], inv_scale)  # a power of 2, which rounds nothing
        for step in (1, 2, 7, 1000):
            _copy_into(ours[0], before[0])
            rest = (mode, 1, 0.1)
            adam(
                65536, overflow, ours, _on_device(3e-2), 0.9, 0.95, 1e-8,
                _on_device(step, torch.int32), *rest, _on_device(inv_scale),
            )  # fmt: skip
            tex.multi_tensor_adam(65536, overflow, theirs, 3e-2, 0.9, 0.95, 1e-8, step, *rest)
            case = (mode, factor, inv_scale, sizes, step)
            assert _equal(ours[1:], theirs[1:]), case
            assert _equal(ours[:1], before if inv_scale == 1.0 else theirs[:1]), case


def _copy_into(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@NEEDS_GPU
def test_what_has_overflown_is_left_out_as_in_transformer_engine() -> None:
    import transformer_engine_torch as tex

    ours = _tensors(FLOAT32, FLOAT32, FLOAT32, SIZES, 1.0, 0)
    before, theirs = _copy(ours), _copy(ours)
    for run, rows in ((_adam(), ours), (tex.multi_tensor_adam_capturable, theirs)):
        run(
            65536, _on_device(1, torch.int32), rows, _on_device(3e-2), 0.9, 0.95, 1e-8,
            _on_device(3, torch.int32), 1, 1, 0.1, _on_device(0.5),
        )  # fmt: skip
        assert _equal(rows, before)


@NEEDS_GPU
def test_corrections_on_the_device_are_those_of_the_host() -> None:
    steps = torch.arange(1, 20_001, dtype=torch.int32, device="cuda")
    for beta in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999):
        found = one_pass_adam._correction(beta, steps)
        assert isinstance(found, torch.Tensor) and found.dtype == FLOAT32
        numbers = [one_pass_adam._correction(beta, step) for step in range(1, 20_001)]
        assert torch.equal(found.cpu(), torch.tensor(numbers, dtype=FLOAT32)), beta


@NEEDS_GPU
def test_a_graph_replays_with_what_is_on_the_device_then() -> None:
    """A call before makes the table; then learning rate, step and clip change under the graph. One
    whose gradients are elsewhere is captured with the optimizer's own function."""
    import transformer_engine_torch as tex

    own: list[Any] = []
    adam = _adam(lambda *told: own.append(told))
    ours = _tensors(BF16, FLOAT32, FLOAT32, SIZES, 1.0, 0)
    theirs, grads = _copy(ours), _copy(ours[:1])[0]
    overflow, scale = _on_device(0, torch.int32), _on_device(1.0)
    lr, step, norm = _on_device(0.0), _on_device(0, torch.int32), _on_device(1.0)

    def update(rows: list[list[torch.Tensor]]) -> None:
        step.add_(1)
        adam.clip = 0.5 / norm  # of the graph's own memory
        adam(65536, overflow, rows, lr, 0.9, 0.95, 1e-8, step, 1, 1, 0.1, scale)
        adam.clip = None

    def expect(number: int, rate: float, norm: float) -> None:
        _copy_into(theirs[0], grads)
        _scale(theirs[0], (0.5 / _on_device(norm)).item())
        tex.multi_tensor_adam(65536, overflow, theirs, rate, 0.9, 0.95, 1e-8, number, 1, 1, 0.1)
        assert int(step) == number and _equal(ours[1:], theirs[1:]), (number, rate, norm)

    lr.fill_(1e-2)
    norm.fill_(1.7)
    update(ours)
    expect(1, 1e-2, 1.7)
    tables = list(adam.tables.known.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(ours)
    (known,) = tables
    assert adam.tables.in_graphs == [known[1]] and not own
    with mock.patch.object(tensor_table, "MOST_TABLES", 1):  # others come and go
        for count in (1, 2):
            rows = _tensors(BF16, FLOAT32, FLOAT32, SIZES[:count], 1.0, 0)
            adam(65536, overflow, rows, lr, 0.9, 0.95, 1e-8, step, 1, 1, 0.1, scale)
    del tables, known, rows
    gc.collect()
    held = [torch.full((32,), -1, device="cuda") for _ in range(200)]  # where a table was
    for number, rate, found in ((2, 3e-2, 0.9), (3, 2e-3, 5.0), (4, 2e-3, 40.0), (5, 0.3, 1.1)):
        lr.fill_(rate)
        norm.fill_(found)
        graph.replay()
        expect(number, rate, found)
    del held
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.warns(UserWarning, match="have moved"):
        update([_copy(ours[:1])[0], *ours[1:]])
    assert len(own) == 1


def trains_alike(rank: int, world: int, strategy: str, ddp: dict[str, Any]) -> str:
    """With the kernel, and with Transformer Engine's behind core's clipping."""
    device = init_megatron()
    runs: list[list[Step]] = []
    for install in (one_pass_adam.install, lambda optimizer: None):
        with mock.patch.object(local_optimizer, "install", install):
            trainer = build_trainer(WIDE, strategy, device, ddp=ddp)
        shards = distributed_optimizer(trainer).optimizer._fsdp_shards
        assert (shards.one_pass is None) == bool(runs)
        steps = _local_run(trainer, rank, 3, device)
        assert runs or shards.one_pass.tables.known, "nothing went through the kernel"
        runs.append(steps)
        del trainer, shards
        gc.collect()
    check_run_bits(runs[0], runs[1], strategy)
    assert min(step.norm for step in runs[0]) > WIDE.clip
    return f"norms {[round(step.norm, 3) for step in runs[0]]}"


CHECKS = {
    "ZeRO-3": Check(trains_alike, ("optim_grads_params", {})),
    "optim, updates behind the step": Check(trains_alike, ("optim", LATE)),
    "streamed": Check(
        trains_alike, ("optim_grads_params", {"chunked_optimizer_state_offload": True})
    ),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=150.0)


@pytest.mark.parametrize("name", CHECKS)
def test_trains_alike_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
