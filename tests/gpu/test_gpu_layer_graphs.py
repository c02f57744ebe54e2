"""Layers in CUDA graphs of their own train like layers that are not, bit for bit, with evaluations
between the steps: losses, norms and weights.

    python -m pytest -q -rA tests/gpu/test_gpu_layer_graphs.py
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from megatron_fsdp_adapter.plan.unit_grouping import UNIT_NUMEL
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO, GIB
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.gpt.checks import check_same_bits
from tests.lib.gpt.gpt import (
    Case,
    Trainer,
    batches,
    forward_backward,
    full_weights,
    init_megatron,
    train_step,
)
from tests.lib.gpt.topologies import (
    TOPOLOGIES,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)
from tests.lib.gpu.gpu_ranks import DETERMINISTIC, Check, Outcomes, expecting
from tests.lib.gpu.runs import COPY_ENGINES, SLOTS, layers_captured, te_trainer

CHECKS = ("graphs/layer_graphs.py", "graphs/captured.py", "graphs/capture.py")

CASE = Case(
    num_layers=4,
    hidden=256,
    heads=4,
    ffn=640,
    vocab=1024,
    seq=128,
    batch=2,
    swiglu=True,
    bias=False,
    bf16=True,
    microbatches=2,
)
STEPS = 6
OTHER_KERNELS = 0.02
"""Bound of losses and norms whose attention other kernels compute, in bf16."""
EXPERTS = {
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


@dataclass(frozen=True)
class Cell:
    """parts: core's names of what is captured; graphs: how many a layer has, forward and backward;
    case, options, ddp: changes of the case, fields of the model's and of the DDP config; lengths:
    of the sequences of the steps in turn, of which the one of the third step is captured; same:
    bits are equal, or else within bounds of bf16."""

    parts: tuple[str, ...] = ()
    graphs: int = 1
    strategy: str = "optim_grads_params"
    case: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=lambda: SLOTS)
    lengths: tuple[int, ...] = (CASE.seq,)
    same: bool = True


FUSED = {"fused": True}
FP8_WEIGHTS = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True}
IN_BLOCKS = {**FP8_WEIGHTS, "fp8_recipe": "blockwise"}
CELLS = {
    "whole layers": Cell(),
    "kept weights": Cell(strategy="optim_grads"),
    "attention and MLP": Cell(parts=("attn", "mlp"), graphs=2),
    "fused weight gradients": Cell(case=FUSED),
    "copy engines, fused": Cell(case=FUSED, ddp=COPY_ENGINES),
    "recomputed attention": Cell(case={"recompute": "selective-core_attn"}),
    "two lengths": Cell(lengths=(128, 64)),
    "dropout": Cell(options={"hidden_dropout": 0.1}),
    "dropout of attention": Cell(options={"attention_dropout": 0.1}),
    # Not a multiple of 128: Transformer Engine may take another attention in captures.
    "odd length": Cell(case={"seq": 96}, lengths=(96,), same=False),
    "replicas": Cell(strategy="no_shard"),
    "experts": Cell(options=EXPERTS),
    "experts, fused": Cell(case=FUSED, options=EXPERTS),
    "FP8": Cell(options={"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "FP8 weights": Cell(options=FP8_WEIGHTS),
    "FP8 weights in blocks, fused": Cell(case=FUSED, options=IN_BLOCKS),
    # Gradients that stay over the microbatches of a step.
    "kept gradients": Cell(strategy="optim", ddp={}),
    "kept gradients, fused": Cell(strategy="no_shard", case=FUSED, ddp={}),
    "kept gradients, FP8": Cell(
        strategy="optim",
        case=FUSED,
        options={"fp8": "hybrid", "fp8_recipe": "tensorwise"},
        ddp={},
    ),
    "kept gradients, FP8 weights": Cell(strategy="optim", case=FUSED, options=FP8_WEIGHTS, ddp={}),
    "kept gradients, FP8 weights in blocks": Cell(
        strategy="optim", case=FUSED, options=IN_BLOCKS, ddp={}
    ),
    "some units kept, FP8 weights": Cell(
        case=FUSED, options=FP8_WEIGHTS, ddp={**SLOTS, BUDGET: 6e6 / GIB}
    ),
    # Four steps are eager before it is found.
    "all units kept, FP8 weights": Cell(case=FUSED, options=FP8_WEIGHTS, ddp={BUDGET: AUTO}),
    "joined": Cell(case=FUSED, ddp={**SLOTS, UNIT_NUMEL: 1_200_000}),
}


def _trainer(cell: Cell, device: torch.device, captured: bool) -> Trainer:
    patches.install(FUSED_WGRAD)
    asked = layers_captured(cell.parts) if captured else {}
    return te_trainer(
        CASE.but(**cell.case),
        cell.strategy,
        device,
        {**cell.options, **asked},
        lambda model: torch.cuda.manual_seed(4321),  # dropout draws from here on
        {"check_for_nan_in_grad": True, **cell.ddp},
        te_rng_tracker=True,
        force_reset_rng=True,
    )


def _train(trainer: Trainer, lengths: tuple[int, ...], rank: int) -> Iterator[Any]:
    """Loss and norm of every step, the loss of the evaluations between, and the weights."""
    device = torch.device("cuda", torch.cuda.current_device())
    for step in range(STEPS):
        trainer.case = trainer.case.but(seq=lengths[step % len(lengths)])
        yield train_step(trainer, batches(trainer.case, step, rank, device))
        if step % 2:
            trainer.wrapper.eval()
            with torch.no_grad():
                data = batches(trainer.case, 90 + step, rank, device)
                yield forward_backward(trainer, data, forward_only=True)
            trainer.wrapper.train()
    yield full_weights(trainer)


def _flat(numbers: list[Any]) -> list[float]:
    """Losses and norms, of steps and evaluations, one after the other."""
    flat: list[float] = []
    for one in numbers:
        flat += one if isinstance(one, tuple) else [one]
    return flat


def same_bits(rank: int, world: int, name: str) -> str:
    cell = CELLS[name]
    device = init_megatron()
    eager = _trainer(cell, device, captured=False)
    *expected, weights = _train(eager, cell.lengths, rank)
    del eager
    gc.collect()
    trainer = _trainer(cell, device, captured=True)
    graphs = trainer.wrapper._layers
    *found, mine = _train(trainer, cell.lengths, rank)
    if cell.same:
        assert found == expected, f"{name}: {found} for {expected}"
        check_same_bits(mine, weights, name)
    else:
        assert _flat(found) == pytest.approx(_flat(expected), rel=OTHER_KERNELS), name
    assert graphs.captured == CASE.num_layers * cell.graphs, (name, graphs.captured)
    others = {why for _, why in graphs.ran_eagerly if "other shapes" not in why}
    assert graphs.replayed and not others, (graphs.replayed, graphs.ran_eagerly)
    assert bool(graphs.ran_eagerly) == (len(cell.lengths) > 1)
    dist.barrier()
    return f"{len(found)} losses, {graphs.captured} calls captured, {graphs.replayed} replayed"


def _topology_numbers(trainer: TopologyTrainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    steps = [topology_step(trainer, step) for step in range(STEPS)]
    return [value for step in steps for value in (step.loss, step.norm)], trainer.params()


def pipeline_same_bits(rank: int, world: int, name: str) -> str:
    """Stages that have several microbatches in flight, with a pool of graphs for each."""
    topology = TOPOLOGIES[name]
    init_topology(topology)
    model_parallel_cuda_manual_seed(7, use_cudagraphable_rng=True, force_reset_rng=True)
    case = case_for(
        topology,
        num_layers=8,
        hidden=128,
        ffn=256,
        vocab=256,
        seq=64,
        microbatches=4,
    )

    def run(captured: bool) -> tuple[Any, Any]:
        def change(model: torch.nn.Module) -> None:
            model.cuda()
            if captured:
                vars(model.config).update(layers_captured(()))

        trainer = build_topology_trainer(
            topology,
            case,
            "optim_grads_params",
            change,
            SLOTS,
            fields={"use_cpu_initialization": True},
        )
        return _topology_numbers(trainer), [chunk._layers for chunk in trainer.chunks]

    (expected, weights), _ = run(captured=False)
    gc.collect()
    (found, mine), graphs = run(captured=True)
    assert found == expected, f"{name}: {found} for {expected}"
    check_same_bits(mine, weights, name)
    for one in graphs:
        assert one.replayed
        assert not one.ran_eagerly
    counted = [(one.captured, one.replayed) for one in graphs]
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return f"{name}: captured, replayed a chunk {counted}"


def flat_memory(rank: int, world: int, steps: int) -> str:
    """Bytes allocated and reserved after the tenth of the steps and after the last."""
    device = init_megatron()
    cell = CELLS["fused weight gradients"]
    trainer = _trainer(cell, device, captured=True)
    seen = []
    for step in range(steps):
        train_step(trainer, batches(trainer.case, step % 7, rank, device))
        if step in (9, steps - 1):
            torch.cuda.synchronize()
            gc.collect()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert seen[0] == seen[1], seen
    allocated, reserved = (number / 2**20 for number in seen[1])
    return f"{steps} steps, {allocated:.1f} MiB allocated, {reserved:.0f} reserved"


DEVICE_CHECKS = {
    "500 steps": Check(flat_memory, (500,)),  # first: nothing of earlier checks may go meanwhile
    **{name: Check(same_bits, (name,)) for name in CELLS},
    # Last: they make other process groups.
    **{name: Check(pipeline_same_bits, (name,)) for name in ("pp2", "pp2-vpp2")},
}
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=400.0, needs=("te",), environment=DETERMINISTIC)

test_on_two_gpus = expecting(OUTCOMES)
