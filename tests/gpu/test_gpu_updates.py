"""An optimizer's step that goes on under the next forward, on two GPUs: the bits of one that waits,
and how much of it runs beside the forward's products.

    python -m pytest -q -rA tests/gpu/test_gpu_updates.py
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.sharding.late_optimizer import OPTION, LateShards
from tests.distributed.checks import Step, check_run_bits
from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.gpu.gpu_ranks import Check, Outcomes
from tests.gpu.test_gpu_layer_graphs import CELLS, Cell, _trainer
from tests.gpu.test_gpu_memory import _steps
from tests.gpu.test_gpu_optimizer_offload import Span, _local_run, _shared, _union

WIDE = Case(
    num_layers=2, hidden=4096, heads=32, ffn=11008, vocab=8192, seq=4096, batch=1, microbatches=1,
    bf16=True, swiglu=True, bias=False, recompute="full-1", clip=0.05,
)  # fmt: skip
"""Recomputed, as the local attention of the tests keeps all its scores."""
LATE = {OPTION: True}
ZERO_3 = "optim_grads_params"


def same_bits(rank: int, world: int, strategy: str) -> str:
    """Of Transformer Engine's FusedAdam, in one call and in one for each unit. Weights are read
    after steps, and after several between which nobody has read any; learning rates change as soon
    as a step has returned."""
    device, runs = init_megatron(), []
    for ddp in ({}, LATE):
        trainer = build_trainer(WIDE, strategy, device, ddp=ddp)
        shards = distributed_optimizer(trainer).optimizer._fsdp_shards
        assert isinstance(shards, LateShards) == bool(ddp)
        runs.append(_local_run(trainer, rank, 2, device))
        runs[-1] += [_unread(trainer, 2 + number, rank, device) for number in range(3)]
        runs[-1].append(_evaluated(trainer, rank, device))
        runs[-1] += _local_run(trainer, rank, 1, device)
        steps = {group.get("step") for group in trainer.optimizer.param_groups}
        assert steps <= {6, None}, steps
        del trainer, shards
        gc.collect()
    check_run_bits(runs[1], runs[0], strategy)
    norms = [[step.norm for step in run] for run in runs]
    assert norms[0] == norms[1] and max(norms[0]) > WIDE.clip, norms
    return f"norms {min(norms[0][:5]):.3f} to {max(norms[0]):.3f}"


def _unread(trainer: Trainer, number: int, rank: int, device: torch.device) -> Step:
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + number)
    loss, norm = train_step(trainer, batches(trainer.case, number, rank, device))
    for group in trainer.optimizer.param_groups:
        group["lr"] = float("nan")
    return Step(loss, norm, {}, {})


def _evaluated(trainer: Trainer, rank: int, device: torch.device) -> Step:
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-2
    loss = forward_backward(trainer, batches(trainer.case, 9, rank, device), forward_only=True)
    return Step(loss, 0.0, {}, {})


def in_layer_graphs(rank: int, world: int, name: str) -> str:
    """Gathers, and what they wait for, are outside of the graphs."""
    cell, device = CELLS[name], init_megatron()
    runs = []
    for ddp in ({}, LATE):
        trainer = _trainer(_with(cell, ddp), device, captured=True)
        graphs = trainer.wrapper._layers.graphs
        unread = [_step(trainer, number, rank, device) for number in range(6)]
        runs.append(unread + _local_run(trainer, rank, 1, device))
        assert graphs.replayed, graphs.ran_eagerly
        del trainer, graphs
        gc.collect()
    check_run_bits(runs[1], runs[0], name)
    return f"last loss {runs[0][-1].loss:.4f}"


def _with(cell: Cell, ddp: dict[str, Any]) -> Cell:
    return replace(cell, ddp={**cell.ddp, **ddp})


def _step(trainer: Trainer, number: int, rank: int, device: torch.device) -> Step:
    loss, norm = train_step(trainer, batches(trainer.case, number, rank, device))
    return Step(loss, norm, {}, {})


def beside_products(rank: int, world: int) -> str:
    """Where the time of Adam's kernels goes: a report, without a bound on it."""
    device = init_megatron()
    trainer = build_trainer(WIDE, ZERO_3, device, ddp=LATE)
    _steps(trainer, rank, 2, device)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _steps(trainer, rank, 3, device)
        torch.cuda.synchronize()
    spans: dict[str, list[Span]] = {"adam": [], "products": []}
    for event in profile.events():
        span, name = (event.time_range.start, event.time_range.end), event.name.lower()
        if "adam" in name:
            spans["adam"].append(span)
        elif any(part in name for part in ("gemm", "nvjet", "cutlass")):
            spans["products"].append(span)
    adam, products = (sum(end - start for start, end in _union(one)) for one in spans.values())
    assert len(spans["adam"]) > 3 and products > 0, len(spans["adam"])
    both = _shared(spans["adam"], spans["products"])
    return (
        f"3 steps: Adam {adam / 3e3:.2f} ms a step in {len(spans['adam']) // 3} kernels, "
        f"{both / adam:.0%} of it beside products"
    )


CHECKS: dict[str, Check] = {
    **{
        f"bits, {strategy}": Check(same_bits, (strategy,))
        for strategy in (ZERO_3, "optim_grads", "optim")
    },
    "layer graphs": Check(in_layer_graphs, ("whole layers",)),
    "layer graphs, copy engines, fused": Check(in_layer_graphs, ("copy engines, fused",)),
    "beside products": Check(beside_products),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=180.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
