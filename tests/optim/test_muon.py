"""Muon on shards: its weights have the bits of whole matrices that are stepped with the run's own
gradients, however model and data are split; and `torch.optim.Muon` on plain modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.megatron.optimizer.muon import updates as rule_of
from megatron_fsdp_adapter.optim.muon.newton_schulz import coefficients_of, orthogonalized
from tests.lib.gpt.checks import NORM, check_number, check_same_bits
from tests.lib.gpt.gather_full import plain_name
from tests.lib.gpt.gpt import STRATEGIES
from tests.lib.gpt.muon_reference import Reference, is_muons
from tests.lib.gpt.topologies import (
    TOPOLOGIES,
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)
from tests.lib.plain.plain import Block, Side, net, tokens
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "optim/muon/shards.py",
    "optim/muon/exchange.py",
    "optim/muon/torch_muon.py",
    "megatron/optimizer/muon.py",
)

LR = 1e-2
DECAY = 0.1
FP32 = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
BF16 = {"optimizer": "muon"}
UNCLIPPED = 1e9
"""A norm that no gradient has: it is computed, and nothing is clipped."""
ROUNDING = 2e-3
"""Of the largest that an entry of an update can be, where clipping multiplies by a norm, which is
rounded in another way."""


@dataclass(frozen=True)
class Cell:
    """Of one topology, under some strategies; fields of the DDP config and of the optimizer's."""

    topology: Topology
    strategies: Iterable[str] = STRATEGIES[-1:]
    ddp: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=lambda: BF16)
    clip: float = UNCLIPPED


def built(cell: Cell, strategy: str, tied: bool) -> TopologyTrainer:
    case = case_for(
        cell.topology, swiglu=True, lr=LR, weight_decay=DECAY, clip=cell.clip, tied=tied
    )
    groups = case.heads if cell.topology.cp > 1 else 2  # the tests' attention over ranks
    return build_topology_trainer(
        cell.topology,
        case,
        strategy,
        ddp=cell.ddp,
        fields={"num_query_groups": groups},
        optimizer_options=cell.options,
    )


def check_strategy(cell: Cell, strategy: str, steps: int) -> None:
    init_topology(cell.topology, cell.ddp.get("num_distributed_optimizer_instances", 1))
    trainer = built(cell, strategy, tied=False)
    assert_matrices_are_muons(trainer)
    if cell.topology.pp > 1:
        assert_matrices_are_muons(built(cell, strategy, tied=True))
    dtype = torch.bfloat16 if cell.options is BF16 else torch.float32
    reference = Reference(
        trainer.chunks[0].config,
        LR,
        DECAY,
        trainer.case.adam_eps,
        cell.clip,
        dtype,
        # One matrix by itself. That it becomes orthogonal: tests/optim/test_newton_schulz.py.
        orthogonalize=lambda matrix, numbers: orthogonalized(matrix[None], numbers)[0],
        coefficients=coefficients_of("quintic", 5),
    )
    params = {name: pair.unsharded for name, pair in trainer._pairs()}
    wanted = trainer.params()
    for number in range(steps):
        found = topology_step(trainer, number)
        if cell.topology is DP:  # others have a part of the gradients on each rank
            norm = math.hypot(*(float(grad.norm()) for grad in found.gradients.values()))
            check_number(found.norm, norm, f"{cell}, {strategy}: norm", NORM)
        wanted = reference.step(params, wanted, found.gradients, found.norm)
    for name, param in params.items():
        error = float((found.weights[name] - wanted[name]).abs().max())
        allowed = 1e-5
        if is_muons(name, param):
            largest = LR * max(param.shape) ** 0.5
            allowed = 0 if cell.clip == UNCLIPPED else ROUNDING * largest
        assert error <= allowed, f"{cell}, {strategy}: {name} is off by {error:.1e}"


def assert_matrices_are_muons(trainer: TopologyTrainer) -> None:
    """By the names of core's layers, which the rule of the package does not go by."""
    pairs = [pair for chunk in trainer.chunks for pair in chunk.engine.pairs]
    for pair in pairs:
        name = plain_name(pair.managed.fqns[0])
        assert rule_of(pair) == is_muons(name, pair.unsharded), name
    groups = [group for group in trainer.optimizer.param_groups if "optimizer" in group]
    of_muon = {id(param) for group in groups for param in group["params"]}
    assert of_muon == {id(pair.sharded) for pair in pairs if rule_of(pair)} != set()


HYBRID = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}
REPLICAS = {**HYBRID, "outer_dp_sharding_strategy": "no_shard"}
EXPERTS_WHOLE = {
    **HYBRID,
    "expert_num_distributed_optimizer_instances": 1,
    "expert_data_parallel_sharding_strategy": "optim",
}
EXPERTS_SPLIT = {
    "expert_num_distributed_optimizer_instances": 2,
    "expert_outer_dp_sharding_strategy": "optim",
}
DP = Topology("dp")
EXPERTS = Topology("experts", experts=4)

BUDGET = "fsdp_unsharded_budget_gib"
AXES: Mapping[int, tuple[tuple[Topology, Mapping[str, Any]], ...]] = {
    1: (),
    2: tuple((TOPOLOGIES[name], {}) for name in ("tp2", "tp2-sp", "ep2", "pp2", "cp2")),
    3: (),
    4: (
        *((topology, {}) for topology in TOPOLOGIES.values()),  # of ep4 a domain of one rank
        *(
            (topology, ddp)
            for topology in (DP, EXPERTS, TOPOLOGIES["tp2"])
            for ddp in (HYBRID, REPLICAS)
        ),
        (TOPOLOGIES["ep2"], EXPERTS_WHOLE),
        (EXPERTS, EXPERTS_SPLIT),
        (DP, {BUDGET: 1.0}),
        (DP, {BUDGET: 3e-5}),
        (DP, {"fsdp_double_buffer": True}),
        (TOPOLOGIES["ep2"], {"megatron_fsdp_enable_fine_grained_param_gather": True}),
    ),
}
"""By the number of ranks, beside data parallelism and experts alone."""


def cells() -> Iterator[Any]:
    """Numbers of ranks and of steps with a cell; those of two steps run without --full."""
    yield 2, 2, Cell(DP, STRATEGIES[::3])
    yield 2, 2, Cell(DP, ("optim",), options=FP32, clip=0.1)
    for name in ("tp2", "ep2", "pp2"):
        yield 2, 2, Cell(TOPOLOGIES[name])
    for (world, axes), options in itertools.product(AXES.items(), (BF16, FP32)):
        for topology, ddp in ((DP, {}), (EXPERTS, {}), *axes):
            every = world < 4 or (topology is DP and ddp in ({}, HYBRID))
            cell = Cell(topology, STRATEGIES if every else STRATEGIES[-1:], ddp, options)
            yield pytest.param(world, 5, cell, marks=pytest.mark.full)


@pytest.mark.parametrize(("world", "steps", "cell"), list(cells()))
@on_ranks(seconds=400)
def test_every_split_under_every_strategy_steps_bit_for_bit_alike(steps: int, cell: Cell) -> None:
    """Clipped, but for rounding."""
    for strategy in cell.strategies:
        check_strategy(cell, strategy, steps)


# Plain modules, with `torch.optim.Muon`.

STEPS = 5
PLAIN_LR = 0.02


def of_blocks(name: str, param: torch.Tensor) -> bool:
    return "blocks" in name and param.dim() == 2


def optimizers(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [param for name, param in named if of_blocks(name, param)]
    rest = [param for name, param in named if not of_blocks(name, param)]
    options = {"lr": PLAIN_LR, "weight_decay": DECAY, "momentum": 0.9, **options}
    return [torch.optim.Muon(matrices, **options), torch.optim.AdamW(rest, lr=1e-3, eps=1e-3)]


def trained(side: Side) -> dict[str, torch.Tensor]:
    model = side.model()
    both = [side.optimizer(optimizer) for optimizer in optimizers(model)]
    for step in range(STEPS):
        side.loss(model, step).backward()
        for optimizer in both:
            optimizer.step()
        model.zero_grad()
    return side.weights()


WORLDS = [2, *(pytest.param(world, marks=pytest.mark.full) for world in (1, 3, 4))]


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_plain_modules_have_the_weights_of_one_process_and_the_same_bits_under_every_strategy(
    rank: int, world: int
) -> None:
    """But for bf16."""
    expected = trained(Side(rank, world, None))
    first, *others = [trained(Side(rank, world, strategy)) for strategy in STRATEGIES]
    # An update has entries of 1 at most, times what its shape gives, and is off by bf16.
    torch.testing.assert_close(first, expected, rtol=0, atol=STEPS * PLAIN_LR * 1.6 * 0.03)
    for other in others:
        check_same_bits(other, first, "another strategy")


def test_what_cannot_be_stepped_is_refused(one_rank: None) -> None:
    model = fully_shard_model(net(), fsdp_unit_modules=[Block])

    class Mine(torch.optim.Muon):
        def step(self, closure: Any = None) -> None:
            raise AssertionError

    first, *others = optimizers(model)[0].param_groups[0]["params"]
    with pytest.raises(ValueError, match=r"optimizer=Mine: its step needs whole tensors"):
        fully_shard_optimizer(Mine([first, *others]))
    muon = torch.optim.Muon([{"params": [first], "ns_steps": 3}, {"params": others}])
    fully_shard_optimizer(muon)
    model(tokens(0, 0, 0)).backward()
    with pytest.raises(ValueError, match="Give all parameter groups the same"):
        muon.step()
    assert len(muon.param_groups[1]["params"]) == len(others)
