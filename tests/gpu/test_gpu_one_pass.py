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

from megatron_fsdp_adapter.sharding import fused_adam, local_optimizer
from megatron_fsdp_adapter.sharding.adam_update import CHUNK
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
DTYPES = [
    (FLOAT32, FLOAT32, FLOAT32), (BF16, FLOAT32, FLOAT32), (BF16, FLOAT32, BF16),
    (FLOAT32, BF16, FLOAT32), (BF16, BF16, BF16),
]  # fmt: skip
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _refuse(*arguments: Any) -> None:
    raise AssertionError("the kernel did not take these")


def _adam(original: Callable[..., Any] = _refuse) -> fused_adam.FusedAdamStep:
    return fused_adam.FusedAdamStep(original, fused_adam.kernel_of)


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


def trains_alike(rank: int, world: int, strategy: str, ddp: dict[str, Any]) -> str:
    """With the kernel, and with Transformer Engine's behind core's clipping."""
    device = init_megatron()
    runs: list[list[Step]] = []
    for install in (fused_adam.install, lambda optimizer: None):
        with mock.patch.object(local_optimizer, "install", install):
            trainer = build_trainer(WIDE, strategy, device, ddp=ddp)
        shards = distributed_optimizer(trainer).optimizer._fsdp_shards
        assert (shards.fused_step is None) == bool(runs)
        steps = _local_run(trainer, rank, 3, device)
        assert runs or shards.fused_step.tables.known, "nothing went through the kernel"
        runs.append(steps)
        del trainer, shards
        gc.collect()
    check_run_bits(runs[0], runs[1], strategy)
    assert min(step.norm for step in runs[0]) > WIDE.clip
    return f"norms {[round(step.norm, 3) for step in runs[0]]}"


CHECKS = {
    "ZeRO-3": Check(trains_alike, ("optim_grads_params", {})),
    "optim": Check(trains_alike, ("optim", {})),
    "streamed": Check(
        trains_alike, ("optim_grads_params", {"chunked_optimizer_state_offload": True})
    ),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=150.0)


@pytest.mark.parametrize("name", CHECKS)
def test_trains_alike_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
