"""`--optimizer muon` under every strategy and parallel axis, beside stock DDP's gradients and Muon
written down once more for whole weights (`muon_reference.py`).

In float32 where what is looked for is rows that went to the wrong place: there the bound is near
rounding. In bf16, the default, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from megatron_fsdp_adapter.megatron.muon import is_muons as rule_of
from megatron_fsdp_adapter.prove.gather_full import plain_name
from tests.distributed.checks import check_gradients, check_norm
from tests.distributed.gpt import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.muon_reference import Reference, is_muons
from tests.distributed.topologies import (
    TOPOLOGIES,
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)

STEPS = 5
LR = 1e-2
FP32 = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
BF16 = {"optimizer": "muon"}
SECOND = {"adaptive_muon_beta2": 0.9, "adaptive_muon_eps": 0.05}
"""With an eps of the size of an entry, so that the sign of one near zero is not all that counts."""
ADAPTIVE = {"optimizer": "adaptive_muon", "muon_fp32_matmul_prec": "highest", **SECOND}
HAS_ADAPTIVE = hasattr(OptimizerConfig, "adaptive_muon_beta2")
BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 0.05}
"""Of the largest that an entry of an update can be. With products of 16 bits a direction that a
gradient hardly has is off by more than rounding: it is divided by how little the gradient has."""


@dataclass(frozen=True)
class Cell:
    topology: Topology
    strategies: tuple[str, ...]
    ddp: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: FP32)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if "muon_fp32_matmul_prec" in self.options else torch.bfloat16


def check(rank: int, world: int, cells: tuple[Cell, ...]) -> None:
    for cell in cells:
        for strategy in cell.strategies:
            check_strategy(cell, strategy)


def check_strategy(cell: Cell, strategy: str) -> None:
    case = case_for(cell.topology, swiglu=True, lr=LR, clip=0.1)
    groups = case.heads if cell.topology.cp > 1 else 2  # the tests' attention over ranks
    build: dict[str, Any] = {"case": case, "fields": {"num_query_groups": groups}}
    init_topology(cell.topology)  # stock DDP adds up over one instance alone
    stock = build_topology_trainer(cell.topology, strategy=None, **build)
    init_topology(cell.topology, cell.ddp.get("num_distributed_optimizer_instances", 1))
    ours = build_topology_trainer(
        cell.topology, strategy=strategy, ddp=cell.ddp, optimizer_options=cell.options, **build
    )
    params = {
        f"{number}.{plain_name(name)}": param
        for number, chunk in enumerate(stock.chunks)
        for name, param in chunk.named_parameters()
    }
    assert_matrices_are_muons(ours)
    reference = Reference(
        stock.chunks[0].config, LR, case.weight_decay, case.adam_eps, case.clip, cell.dtype,
        second=tuple(SECOND.values()) if "adaptive_muon_eps" in cell.options else None,  # type: ignore
    )
    for step in range(STEPS):
        before = ours.weights()
        with torch.no_grad():
            for name, value in before.items():
                params[name].copy_(value)
        expected, got = topology_step(stock, step), topology_step(ours, step)
        label = f"{cell.topology.name}, {strategy}, {cell.ddp}, step {step}"
        check_gradients(got.gradients, expected.gradients, label)
        check_norm(got.norm, expected.norm, label)
        wanted = reference.step(params, before, expected.gradients, expected.norm)
        check_updates(got.weights, wanted, cell.dtype, label)


def assert_matrices_are_muons(trainer: TopologyTrainer) -> None:
    """By the names of core's layers, which the rule of the package does not go by."""
    for chunk in trainer.chunks:
        for pair in chunk.engine.pairs:
            name = plain_name(pair.managed.fqns[0])
            assert rule_of(pair) == is_muons(name, pair.unsharded), name
    of_muon = {id(p) for g in trainer.optimizer.param_groups if "optimizer" in g
               for p in g["params"]}  # fmt: skip
    found = {id(p.sharded) for c in trainer.chunks for p in c.engine.pairs if rule_of(p)}
    assert of_muon == found and found


def check_updates(
    got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], dtype: torch.dtype,
    label: str,
) -> None:  # fmt: skip
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        error = (got[name] - value).abs().max().item()
        allowed = 1e-5
        if is_muons(name, value):
            allowed = BOUNDS[dtype] * LR * max(value.shape) ** 0.5
        assert error <= allowed, f"{label}: {name} is off by {error:.2e}; allowed {allowed:.1e}"


TWO_RANKS = (
    Cell(Topology("dp2"), ("no_shard", "optim_grads_params")),
    Cell(Topology("dp2"), ("optim",), options=BF16),
    Cell(TOPOLOGIES["tp2"], ("optim_grads_params",)),
)


def test_two_ranks_step_as_one_does_on_whole_matrices() -> None:
    """Data-parallel, tensor-parallel; in bf16."""
    run_ranks(check, 2, TWO_RANKS)


FULL = {
    "tp2": Cell(TOPOLOGIES["tp2-sp"], STRATEGIES),
    "tp2 in bf16": Cell(TOPOLOGIES["tp2"], ("optim", "optim_grads_params"), options=BF16),
    "ep2": Cell(TOPOLOGIES["ep2"], STRATEGIES),
    "ep4, a domain of one rank": Cell(TOPOLOGIES["ep4"], ("optim", "optim_grads_params")),
    "ep2-etp2": Cell(TOPOLOGIES["ep2-etp2"], ("optim_grads", "optim_grads_params")),
    "pp2": Cell(TOPOLOGIES["pp2"], STRATEGIES),
    "pp2-vpp2": Cell(TOPOLOGIES["pp2-vpp2"], ("optim_grads_params",)),
    "cp2": Cell(TOPOLOGIES["cp2"], ("optim_grads_params",)),
    "hybrid": Cell(Topology("hybrid"), STRATEGIES, {
        "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}),
    "replicas": Cell(Topology("hsdp"), ("no_shard", "optim_grads_params"), {
        "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "no_shard"}),
    "units that stay whole": Cell(
        Topology("dp"), ("optim_grads_params",), {"fsdp_unsharded_budget_gib": 1.0}),
    "units that stay whole in part": Cell(
        Topology("dp"), ("optim_grads_params",), {"fsdp_unsharded_budget_gib": 3e-5}),
    "experts as units": Cell(TOPOLOGIES["ep2"], ("optim_grads_params",), {
        "megatron_fsdp_enable_fine_grained_param_gather": True}),
    "slots": Cell(Topology("dp"), ("optim_grads_params",), {"fsdp_double_buffer": True}),
}  # fmt: skip


@pytest.mark.skipif(not HAS_ADAPTIVE, reason="this core has no adaptive_muon_beta2")
def test_adaptive_muon_keeps_its_second_moment_in_rows() -> None:
    cells = (
        Cell(Topology("dp2"), ("no_shard", "optim_grads_params"), options=ADAPTIVE),
        Cell(TOPOLOGIES["tp2"], ("optim",), options=ADAPTIVE),
    )
    run_ranks(check, 2, cells)


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_four_ranks_step_as_one_does_on_whole_matrices(name: str) -> None:
    run_ranks(check, 4, (FULL[name],), timeout=240.0)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_strategies_step_as_one_rank_does_on_whole_matrices(world: int) -> None:
    run_ranks(check, world, (Cell(Topology("dp"), STRATEGIES),), timeout=240.0)
