"""The gradient norm in one launch against float64 and megatron-core's own, by itself, in a CUDA
graph and in training at the real width; the time that it takes is printed.

    python -m pytest -q -rA -s tests/gpu/test_gpu_one_pass_norm.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_fsdp_adapter.megatron import clipping
from megatron_fsdp_adapter.sharding import one_pass_norm
from megatron_fsdp_adapter.sharding.one_pass_norm import CHUNK, OnePassSquares
from tests.distributed.gpt import batches, build_trainer, distributed_optimizer, init_megatron
from tests.distributed.gpt import train_step as take_step
from tests.gpu.captured import forget_graphs
from tests.gpu.gpu_ranks import Check, Outcomes
from tests.gpu.test_gpu_first import CAPTURED
from tests.gpu.test_gpu_graphs import WARMUP, _run
from tests.gpu.test_gpu_one_pass import LATE, WIDE

pytest.importorskip("transformer_engine.pytorch")

FLOAT32, BF16 = torch.float32, torch.bfloat16
UNEVEN = (1_000_003, 4096 * 33, 7, 65536 * 2 + 1, 1, CHUNK * 3, CHUNK - 1)
EVEN = (8192, 4096 * 64, 24, CHUNK * 5 + 8)
MANY = (4096 * 4096, 4096 * 11008, 4096, 4096 * 11008) * 6 + (32768 * 2048, 4096)
"""Of 700M elements."""
STEPS = 4
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _squares() -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """What the kernel gives, which has to take the tensors."""
    squares = OnePassSquares(one_pass_norm.kernel_of)

    def found(tensors: list[torch.Tensor]) -> torch.Tensor:
        total = squares(tensors)
        assert total is not None, "the kernel did not take these"
        return total

    return found


def _core_s(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm as megatron-core asks Transformer Engine for it."""
    import transformer_engine_torch as tex

    overflow = torch.zeros(1, dtype=torch.int, device="cuda")
    found, _ = tex.multi_tensor_l2norm(2048 * 32, overflow, [tensors], False)
    return found


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
@pytest.mark.parametrize(
    ("sizes", "skip"), [(UNEVEN, 0), (EVEN, 0), (EVEN, 1), ((3,), 0), ((0, 5, 0), 0), ((0,), 0)]
)
def test_sums_are_those_in_float64(dtype: torch.dtype, sizes: tuple[int, ...], skip: int) -> None:
    squares = _squares()
    for scale in (1.0, 1e-4, 1e4):
        tensors = [
            (torch.randn(n + skip, device="cuda").exp() * scale).to(dtype)[skip:] for n in sizes
        ]
        found = squares(tensors)
        assert found.shape == (1,) and found.dtype == FLOAT32
        expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
        assert abs(found.item() - expected) <= 5e-7 * expected, (found, expected)
        assert all(torch.equal(squares(tensors), found) for _ in range(5)), "not the same bits"


@NEEDS_GPU
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_stays_so(wrong: float) -> None:
    squares = _squares()
    tensors = [torch.randn(size, device="cuda") for size in UNEVEN]
    for tensor in tensors:
        for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
            before = tensor[place].item()
            tensor[place] = wrong
            assert repr(squares(tensors).item()) == repr(wrong * wrong)
            tensor[place] = before
    assert math.isfinite(squares(tensors).item())


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
def test_time_beside_transformer_engine(dtype: torch.dtype) -> None:
    """Printed, and how far both are from float64."""
    squares, size = _squares(), sum(MANY)
    tensors = list(torch.randn(size, device="cuda").to(dtype).split(MANY))
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "one launch": lambda: squares(tensors).sqrt(),
        "Transformer Engine": lambda: _core_s(tensors),
    }
    errors = {}
    for name, way in ways.items():
        errors[name] = abs(way().item() / math.sqrt(expected) - 1)
        taken = _milliseconds(way)
        rate = size * dtype.itemsize / taken / 1e9
        print(f"\n{name}, {size / 1e6:.0f}M of {dtype}: {taken:.3f} ms, {rate:.2f} TB/s, "
              f"off by {errors[name]:.1e}", end="")  # fmt: skip
    assert errors["one launch"] <= 2e-7, "roundings of a square and of a root to float32"


def _milliseconds(way: Callable[[], torch.Tensor], times: int = 20) -> float:
    """The median of calls in a row, on the device."""
    for _ in range(3):
        way()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        way()
        event.record()
    torch.cuda.synchronize()
    spans = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return spans[times // 2]


def norms_alike(rank: int, world: int, strategy: str, ddp: dict[str, bool]) -> str:
    """In each step both, of the same gradients."""
    device = init_megatron()
    trainer = build_trainer(WIDE, strategy, device, ddp=ddp)
    optimizer = distributed_optimizer(trainer)
    shards, original, pairs = optimizer.optimizer._fsdp_shards, clipping.norm_of, []

    def both(*asked: Any) -> Any:
        found = original(*asked)
        with mock.patch.multiple(shards, squares=lambda tensors: None, of_sums=None):
            core_s = original(*asked)
        assert type(found) is type(core_s)
        assert not isinstance(found, torch.Tensor) or found.shape == core_s.shape
        pairs.append((float(found), float(core_s)))
        return found

    with mock.patch.object(clipping, "norm_of", both):
        for number in range(STEPS):
            _, norm = take_step(trainer, batches(WIDE, number, rank, device))
            assert float(norm) == pairs[-1][0] > WIDE.clip
    left = bool(ddp.get("fsdp_copy_engine_reduce_scatter"))
    reads = not left and (strategy != "no_shard" or rank == 0)
    assert (shards.of_sums is not None) is left
    assert bool(shards.squares.tables.known) is reads, "not what goes through the kernel"
    apart = [abs(ours / core_s - 1) for ours, core_s in pairs]
    assert len(pairs) == STEPS and max(apart) <= 1e-6, pairs
    return f"norms {[round(ours, 4) for ours, _ in pairs]}, apart by {max(apart):.1e} at most"


def captured_norms_alike(rank: int, world: int) -> str:
    """Of squares that replays leave, and of gradients that are read."""
    device = init_megatron()
    model_parallel_cuda_manual_seed(7, use_cudagraphable_rng=True, force_reset_rng=True)
    trainer = build_trainer(
        CAPTURED, "optim_grads_params", device, ddp={"check_for_nan_in_grad": False, **CARRIED}
    )
    optimizer = distributed_optimizer(trainer)
    shards, pairs = optimizer.optimizer._fsdp_shards, []
    schedule = FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=WARMUP)
    try:
        for number in range(STEPS + WARMUP):
            _run(trainer, schedule, number, rank, training=True)
            with mock.patch.object(shards, "of_sums", None):
                read = float(clipping.norm_of(optimizer, None))
            shards.squares.tables.known.clear()
            success, norm, _ = trainer.optimizer.step()
            assert success and not shards.squares.tables.known, "gradients were read"
            pairs.append((float(norm), read))
        assert FullCudaGraphWrapper.cuda_graph["training"] is not None
    finally:
        forget_graphs()
    apart = [abs(left / read - 1) for left, read in pairs]
    assert max(apart) <= 1e-6 and len({read for _, read in pairs}) == len(pairs), pairs
    return f"norms {[round(left, 4) for left, _ in pairs]}, apart by {max(apart):.1e} at most"


CARRIED = {"fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True}
CHECKS = {
    "left by sums": Check(norms_alike, ("optim_grads_params", CARRIED)),
    "left by sums in a graph": Check(captured_norms_alike),
    "ZeRO-3": Check(norms_alike, ("optim_grads_params", {})),
    "optim, updates behind the step": Check(norms_alike, ("optim", LATE)),
    "streamed": Check(
        norms_alike, ("optim_grads_params", {"chunked_optimizer_state_offload": True})
    ),
    "no_shard": Check(norms_alike, ("no_shard", {})),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=150.0)


@pytest.mark.parametrize("name", CHECKS)
def test_norms_in_training_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
