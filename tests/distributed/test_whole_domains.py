"""Domains of one rank, experts with as much expert as data parallelism or a world of one: nothing
of them is sharded, so they train as under stock DDP, bit for bit."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.topology import EXPERT
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from megatron_fsdp_adapter.sharding.unsharded_budget import OPTION
from tests.distributed.checks import check_run_bits, check_same_bits, check_step, free_run
from tests.distributed.gpt import Case, build_trainer, init_megatron
from tests.distributed.launch import run_ranks
from tests.distributed.topologies import (
    Topology,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)

pytestmark = pytest.mark.once

ZERO_1, ZERO_2, ZERO_3 = "optim", "optim_grads", "optim_grads_params"
EP2 = Topology("ep2", ep=2, experts=4)
ALL_GIB = 1.0
VARIANTS: tuple[dict[str, Any], ...] = (
    {}, {"fsdp_double_buffer": True},
    {"megatron_fsdp_enable_fine_grained_param_gather": True},
)  # fmt: skip


def _experts(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if ".experts." in name}


def _experts_of_two_ranks(rank: int, world: int) -> str:
    """What the wrapper has printed. With a budget for everything else the run is that of `optim`;
    without, dense gradients are summed in another order, so each step starts from the same
    weights, and those of experts are compared."""
    init_topology(EP2)
    case, said = case_for(EP2, bf16=True, microbatches=2), io.StringIO()
    theirs = build_topology_trainer(EP2, case, None)
    with contextlib.redirect_stdout(said):
        ours = {
            f"{strategy}, {options}": build_topology_trainer(EP2, case, strategy, ddp=options)
            for strategy, options in [(ZERO_2, {}), *((ZERO_3, one) for one in VARIANTS)]
        }
    for step in range(2):
        weights = theirs.weights()
        expected = topology_step(theirs, step)
        for name, trainer in ours.items():
            trainer.load(weights)
            found, label = topology_step(trainer, step), f"{name}, step {step}"
            check_same_bits(_experts(found.gradients), _experts(expected.gradients), label)
            check_step(found, expected, label)
            groups = [group for chunk in trainer.chunks for group in chunk.engine.groups]
            experts = [group for group in groups if group.key.domain == EXPERT]
            assert experts and all(group.bucket is group.grad for group in experts)
    kept = build_topology_trainer(EP2, case, ZERO_3, ddp={OPTION: ALL_GIB})
    plain = build_topology_trainer(EP2, case, ZERO_1)
    for step in range(2):
        found, expected = topology_step(kept, step), topology_step(plain, step)
        check_run_bits([found], [expected], f"everything kept, step {step}")
    return said.getvalue()


def test_experts_of_as_many_ranks_as_there_are_train_as_under_ddp():
    said = run_ranks(_experts_of_two_ranks, 2, timeout=300)[0]
    assert said.count("whole, on one rank: expert parameters") == 4, said


def _alone(rank: int, world: int) -> str:
    """Where weights are tied, or gradients divided by the tokens, Adam's kernels round otherwise on
    flat buffers of other lengths: then the reference is `optim`."""
    device, said = init_megatron(), io.StringIO()
    patches.install(FUSED_WGRAD)
    narrow = {"megatron_fsdp_grad_comm_dtype": torch.bfloat16}
    for case, reference, options in (
        (Case(bf16=True), None, narrow), (Case(tied=True, per_token_loss=True), ZERO_1, {}),
        (Case(bf16=True, fused=True), None, {}), (Case(fp16=True), None, {}),
    ):  # fmt: skip
        expected = free_run(build_trainer(case, reference, device), rank, 3, device)
        for strategy in (ZERO_2, ZERO_3):
            with contextlib.redirect_stdout(said):
                trainer = build_trainer(case, strategy, device, ddp=options)
            found = free_run(trainer, rank, 3, device)
            check_run_bits(found, expected, f"{strategy}, {case}")
    return said.getvalue()


def test_a_world_of_one_trains_as_ddp():
    (said,) = run_ranks(_alone, 1, timeout=300, whole=True)
    assert said.count("whole, on one rank: dense parameters") == 8, said
