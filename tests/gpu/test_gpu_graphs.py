"""A training step in one CUDA graph, captured by megatron-core, trains like one that is not, bit
for bit, with an evaluation in a graph of its own between the steps."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fsdp_adapter.sharding.unsharded_budget import GIB
from megatron_fsdp_adapter.sharding.unsharded_budget import OPTION as BUDGET
from tests.distributed.checks import check_same_bits
from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_step,
    full_weights,
    init_megatron,
)
from tests.gpu.captured import forget_graphs
from tests.gpu.gpu_ranks import Check, Outcomes

CASE = Case(
    num_layers=5, hidden=256, heads=4, ffn=640, vocab=1000, seq=128, batch=2, swiglu=True,
    bf16=True, microbatches=2,
)  # fmt: skip
STEPS, WARMUP = 6, 2
SLOTS: dict[str, Any] = {"fsdp_double_buffer": True}
CELLS: dict[str, tuple[str, Case, dict[str, Any]]] = {
    "no_shard": ("no_shard", CASE, {}),
    "optim": ("optim", CASE, {}),
    "optim_grads": ("optim_grads", CASE, {}),
    "optim_grads_params": ("optim_grads_params", CASE, {}),
    "slots": ("optim_grads_params", CASE, SLOTS),
    "slots, one microbatch": ("optim_grads_params", CASE.but(microbatches=1), SLOTS),
    "registered": ("optim_grads_params", CASE, {"nccl_ub": True}),
    "copy engines": ("optim_grads_params", CASE, {"fsdp_copy_engine_all_gather": True}),
    "gradients by copy engines": (
        "optim_grads_params", CASE, {"fsdp_copy_engine_reduce_scatter": True}
    ),
    "some units whole": ("optim_grads_params", CASE, {**SLOTS, BUDGET: 6e6 / GIB}),
    "all units whole, copy engines": (
        "optim_grads_params", CASE,
        {
            "fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True,
            BUDGET: 1.0,
        },
    ),
}


def _from_dicts(case: Case, iterator: Iterator[Any], model: Any) -> Any:
    return forward_step(case, iter([next(iterator)["tokens"]]), model)


def _run(trainer: Trainer, schedule: Any, step: int, rank: int, training: bool) -> torch.Tensor:
    """The mean loss of this rank's microbatches, of a step or of an evaluation."""
    case = trainer.case
    device = next(trainer.wrapper.parameters()).device
    if training:
        trainer.wrapper.zero_grad_buffer()
        trainer.optimizer.zero_grad()
    reports = schedule(
        forward_step_func=functools.partial(_from_dicts, case),
        data_iterator=iter([{"tokens": data} for data in batches(case, step, rank, device)]),
        model=[trainer.wrapper],
        num_microbatches=case.microbatches,
        seq_length=case.seq,
        micro_batch_size=case.batch,
        forward_only=not training,
    )
    return torch.stack([report["loss"] for report in reports]).mean().clone()


def train(
    trainer: Trainer,
    schedule: Any,
    rank: int,
    steps: int = STEPS,
    after_backward: Callable[[int], None] = lambda step: None,
) -> tuple[list[float], dict[str, Any]]:
    """Losses and norms of all steps and evaluations, and the weights at the end."""
    numbers: list[float] = []
    for step in range(steps):
        numbers.append(_run(trainer, schedule, step, rank, training=True).item())
        after_backward(step)
        success, norm, _ = trainer.optimizer.step()
        assert success
        numbers.append(float(norm))
        if step % 2:
            trainer.wrapper.eval()
            with torch.no_grad():
                numbers.append(_run(trainer, schedule, 90 + step, rank, training=False).item())
            trainer.wrapper.train()
    return numbers, full_weights(trainer)


def same_bits(rank: int, world: int, name: str) -> str:
    strategy, case, options = CELLS[name]
    device = init_megatron()
    tensor_parallel.model_parallel_cuda_manual_seed(
        7, use_cudagraphable_rng=True, force_reset_rng=True
    )
    ddp = {"check_for_nan_in_grad": False, **options}
    eager = build_trainer(case, strategy, device, ddp=ddp)
    expected = train(eager, get_forward_backward_func(), rank)
    del eager
    gc.collect()
    graphed = build_trainer(case, strategy, device, ddp=ddp)
    schedule = FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=WARMUP)
    try:
        found = train(graphed, schedule, rank)
        replayed = FullCudaGraphWrapper.cuda_graph
        assert all(replayed.values()), f"not captured: {replayed}"
    finally:
        forget_graphs()
    assert found[0] == expected[0], f"{name}: {found[0]} for {expected[0]}"
    check_same_bits(found[1], expected[1], name)
    dist.barrier()
    return f"{len(found[0])} losses and norms, last loss {found[0][-1]:.4f}"


CHECKS = {name: Check(same_bits, (name,)) for name in CELLS}
OUTCOMES = Outcomes(CHECKS, timeout_s=150.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
