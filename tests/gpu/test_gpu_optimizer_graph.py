"""The optimizer's step in a CUDA graph, captured by megatron-core: the bits of steps that no graph
may have (`optimizer_cuda_graph` off), both with Adam in one pass, with a learning rate that changes
and clipping, beside an eager forward, graphs of layers and a graph of the whole iteration.

    python -m pytest -q -rA tests/gpu/test_gpu_optimizer_graph.py
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fsdp_adapter.megatron.seams import core_api
from tests.distributed.checks import check_same_bits
from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    init_megatron,
    train_step,
)
from tests.gpu.captured import forget_graphs
from tests.gpu.gpu_ranks import Check, Outcomes
from tests.gpu.test_gpu_graphs import CASE, SLOTS, STEPS, WARMUP, train
from tests.gpu.test_gpu_layer_graphs import CELLS as LAYER_CELLS
from tests.gpu.test_gpu_layer_graphs import _train as train_layers
from tests.gpu.test_gpu_layer_graphs import _trainer as layer_trainer
from tests.gpu.test_gpu_updates import WIDE

ON = {"optimizer_cuda_graph": True}
CLIPPED = CASE.but(clip=0.05)
ZERO_3 = "optim_grads_params"
COPY_ENGINES: dict[str, Any] = {
    "fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True
}  # fmt: skip
Run = Callable[[Trainer], Any]


def _follow_schedule(trainer: Trainer, step: int) -> None:
    """As core's scheduler: the tensor that a capturable optimizer has is filled."""
    rate = trainer.case.lr * (1 + step % 5) / 5
    for group in trainer.optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _counted(trainer: Trainer) -> list[int]:
    """An entry for each step of the inner optimizer whose Python runs."""
    ran: list[int] = []
    inner = distributed_optimizer(trainer).optimizer
    inner.register_step_post_hook(lambda *unused: ran.append(1))
    return ran


def _compare(build: Callable[[bool], Trainer], run: Run, name: str) -> str:
    """`build(False)` steps, with an optimizer for that; `build(True)` has its step captured, and
    may have more so. `run` gives numbers and weights."""
    forget_graphs()
    eager = build(False)
    adam = distributed_optimizer(eager).optimizer
    shards = adam._fsdp_shards
    shards.of_sums = None  # squares that sums leave add up in another order than those of a graph
    expected, weights = run(eager)
    assert not adam.capturable and shards.one_pass.tables.known, "not Adam in one pass"
    # Without sharding the norm counts the first rank's gradients.
    reads = eager.wrapper.engine.config.strategy.shard_main or dist.get_rank() == 0
    assert shards.squares.tables.known or not reads, "not the norm in one pass"
    del eager, adam, shards
    gc.collect()
    trainer = build(True)
    ran = _counted(trainer)
    trainer.optimizer.step = core_api.STEP_GRAPHS(
        trainer.optimizer.step, cuda_graph_warmup_steps=WARMUP
    )
    try:
        found, mine = run(trainer)
        assert core_api.STEP_GRAPHS.cuda_graph is not None, "not captured"
        assert len(ran) == WARMUP + 1, f"{len(ran)} steps ran"
        adam = distributed_optimizer(trainer).optimizer
        shards = adam._fsdp_shards
        assert adam.capturable and shards.one_pass.tables.in_graphs, "not Adam in one pass"
        assert shards.squares.tables.in_graphs or not reads, "not the norm in one pass"
        steps = {int(g["step"]) for g in trainer.optimizer.param_groups if g["params"]}
        assert len(steps) == 1, steps
    finally:
        del trainer.optimizer.step
        forget_graphs()
    assert found == expected, f"{name}: {found} for {expected}"
    check_same_bits(mine, weights, name)
    dist.barrier()
    return f"{len(found)} numbers, after {steps.pop()} steps: {found[-2:]}"


def _seed() -> torch.device:
    device = init_megatron()
    tensor_parallel.model_parallel_cuda_manual_seed(
        7, use_cudagraphable_rng=True, force_reset_rng=True
    )
    return device


def same_bits(
    rank: int, world: int, strategy: str, whole: bool, case: Case, options: dict[str, Any]
) -> str:
    """whole: forward and backward are a graph too, in the run whose step is one."""
    device = _seed()
    captured: list[bool] = []

    def build(graphed: bool) -> Trainer:
        captured.append(graphed and whole)
        return build_trainer(
            case, strategy, device, ddp={"check_for_nan_in_grad": False, **options},
            optimizer=ON if graphed else {},
        )

    def run(trainer: Trainer) -> Any:
        schedule: Any = get_forward_backward_func()
        if captured[-1]:
            schedule = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=WARMUP)
        found = train(
            trainer, schedule, rank, STEPS, lambda step: _follow_schedule(trainer, step)
        )
        assert not captured[-1] or all(FullCudaGraphWrapper.cuda_graph.values())
        return found

    return _compare(build, run, f"{strategy}, whole={whole}, {options}")


def wide(rank: int, world: int, strategy: str) -> str:
    device = init_megatron()

    def run(trainer: Trainer) -> Any:
        found: list[Any] = []
        for step in range(WARMUP + 4):
            _follow_schedule(trainer, step)
            found += train_step(trainer, batches(trainer.case, step, rank, device))
        return found, trainer.params()

    return _compare(
        lambda graphed: build_trainer(WIDE, strategy, device, optimizer=ON if graphed else {}),
        run, strategy,
    )


def with_layers(rank: int, world: int, name: str) -> str:
    """Against layers and steps that run eagerly."""
    cell, device = LAYER_CELLS[name], init_megatron()

    def run(trainer: Trainer) -> Any:
        *found, weights = train_layers(trainer, cell.lengths, rank)
        return found, weights

    return _compare(
        lambda graphed: layer_trainer(cell, device, captured=graphed, **(ON if graphed else {})),
        run, name,
    )


def _cell(strategy: str, whole: bool = False, case: Case = CLIPPED, **options: Any) -> Check:
    return Check(same_bits, (strategy, whole, case, options))


CHECKS = {
    "hidden 4096": Check(wide, (ZERO_3,)),
    "layers": Check(with_layers, ("whole layers",)),
    "one graph": _cell(ZERO_3, whole=True, **SLOTS),
    "optim_grads_params": _cell(ZERO_3),
    "float32": _cell(ZERO_3, case=CLIPPED.but(bf16=False)),
    "optim": _cell("optim"),
    "copy engines, one graph": _cell(ZERO_3, whole=True, **COPY_ENGINES),
    "layers, FP8 weights": Check(with_layers, ("FP8 weights",)),
    "optim_grads": _cell("optim_grads"),
    "no_shard": _cell("no_shard"),
    "optim, one graph": _cell("optim", whole=True),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=240.0)
HAS_TE = importlib.util.find_spec("transformer_engine") is not None
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # the ranks inherit it


@pytest.mark.skipif(core_api.STEP_GRAPHS is None, reason="no optimizer_cuda_graph in this release")
@pytest.mark.skipif(not HAS_TE, reason="transformer_engine is not installed")
@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
