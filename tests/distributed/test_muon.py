"""Muon on shards: with gradients that are set, its weights have the bits of whole matrices, however
model and data are split; and `torch.optim.Muon` on plain modules.

Gradients of models that are split differently differ by the order of sums. Here every rank takes
its part of a tensor that is made for the whole parameter, by a name that is the same everywhere.
All cells are compared with one computation on whole tensors, and so with each other.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.megatron.muon import has as rule_of
from megatron_fsdp_adapter.optim.muon.newton_schulz import coefficients_of, orthogonalized
from tests.distributed.checks import check_norm, check_same_bits
from tests.distributed.gather_full import plain_name
from tests.distributed.gpt import STRATEGIES
from tests.distributed.groups import everyones
from tests.distributed.muon_reference import Reference, is_muons, own_part, tensor_group
from tests.distributed.plain import Block, Side, net, tokens
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.topologies import (
    TOPOLOGIES,
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    global_name,
    init_topology,
    run_schedule,
)

LR, DECAY = 1e-2, 0.1
FP32 = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
BF16 = {"optimizer": "muon"}
UNCLIPPED = 1e9
"""A norm that no gradient has: it is computed, and nothing is clipped."""
ROUNDING = 2e-3
"""Of the largest that an entry of an update can be, where clipping multiplies by a norm, which is
rounded in another way."""


def by_package(matrix: torch.Tensor, coefficients: Any) -> torch.Tensor:
    """One matrix by itself. That it becomes orthogonal: tests/sharding/test_newton_schulz.py."""
    return orthogonalized(matrix[None], coefficients)[0]


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
        cell.topology, case, strategy, ddp=cell.ddp, fields={"num_query_groups": groups},
        optimizer_options=cell.options,
    )  # fmt: skip


def check_strategy(cell: Cell, strategy: str, steps: int) -> None:
    init_topology(cell.topology, cell.ddp.get("num_distributed_optimizer_instances", 1))
    trainer = built(cell, strategy, tied=False)
    assert_matrices_are_muons(trainer)
    if cell.topology.pp > 1:
        assert_matrices_are_muons(built(cell, strategy, tied=True))
    names = {local: (global_name(trainer, local), pair) for local, pair in trainer._pairs()}
    case, config = trainer.case, trainer.chunks[0].config
    dtype = torch.bfloat16 if cell.options is BF16 else torch.float32
    reference = Reference(
        config, LR, DECAY, case.adam_eps, cell.clip, dtype, orthogonalize=by_package,
        coefficients=coefficients_of("quintic", 5),
    )  # fmt: skip
    params = {name: pair.unsharded for name, pair in names.values()}
    wanted = {name: own(param, name, 0) for name, param in params.items()}
    trainer.load({local: wanted[name] for local, (name, _) in names.items()})
    for step in range(1, steps + 1):
        run_schedule(trainer, step)
        gradients = {name: own(param, name, step) for name, param in params.items()}
        for name, pair in names.values():
            if pair.sharded.grad is not None:
                local, held = pair.sharded.grad._local_tensor, pair.sharded.megatron_fsdp_slice
                local.copy_(gradients[name].reshape(-1)[held].view(local.shape))
        done, norm, _ = trainer.optimizer.step()
        assert done
        check_norm(float(norm), norm_of_all(params, step), f"{cell}, {strategy}")
        wanted = reference.step(params, wanted, gradients, float(norm))
    found = trainer.params()
    for local, (name, pair) in names.items():
        label = f"{cell}, {strategy}: {name}"
        error = float((found[local] - wanted[name]).abs().max())
        allowed = 1e-5
        if is_muons(name, pair.unsharded):
            largest = LR * max(pair.unsharded.shape) ** 0.5
            allowed = 0 if cell.clip == UNCLIPPED else ROUNDING * largest
        assert error <= allowed, f"{label} is off by {error:.1e}"


def assert_matrices_are_muons(trainer: TopologyTrainer) -> None:
    """By the names of core's layers, which the rule of the package does not go by."""
    pairs = [pair for chunk in trainer.chunks for pair in chunk.engine.pairs]
    for pair in pairs:
        name = plain_name(pair.managed.fqns[0])
        assert rule_of(pair) == is_muons(name, pair.unsharded), name
    groups = [group for group in trainer.optimizer.param_groups if "optimizer" in group]
    of_muon = {id(param) for group in groups for param in group["params"]}
    assert of_muon == {id(pair.sharded) for pair in pairs if rule_of(pair)} != set()


def whole_shape(param: Any, name: str) -> list[int]:
    shape = list(param.shape)
    if getattr(param, "tensor_model_parallel", False):
        shape[param.partition_dim] *= tensor_group(name).size()
    return shape


def made(shape: list[int], name: str, step: int) -> torch.Tensor:
    """Of the whole parameter: its weight, for step 0, or gradient."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator) * 0.1


def own(param: Any, name: str, step: int) -> torch.Tensor:
    """This rank's part under tensor parallelism."""
    return own_part(param, name, made(whole_shape(param, name), name, step))


def norm_of_all(params: Mapping[str, Any], step: int) -> float:
    """Of the gradients of the whole model, each of which counts once; collective."""
    shapes = everyones({n: whole_shape(param, n) for n, param in params.items()})
    every = {name: shape for one in shapes for name, shape in one.items()}
    return math.hypot(*(float(made(s, name, step).norm()) for name, s in every.items()))


HYBRID = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}
REPLICAS = {**HYBRID, "outer_dp_sharding_strategy": "no_shard"}
DP, EXPERTS = Topology("dp"), Topology("experts", experts=4)

BUDGET = "fsdp_unsharded_budget_gib"
AXES: Mapping[int, tuple[tuple[Topology, Mapping[str, Any]], ...]] = {
    1: (),
    2: tuple((TOPOLOGIES[name], {}) for name in ("tp2", "tp2-sp", "ep2", "pp2", "cp2")),
    3: (),
    4: (
        *((topology, {}) for topology in TOPOLOGIES.values()),  # of ep4 a domain of one rank
        *((topology, ddp) for topology in (DP, EXPERTS, TOPOLOGIES["tp2"])
          for ddp in (HYBRID, REPLICAS)),
        (DP, {BUDGET: 1.0}), (DP, {BUDGET: 3e-5}), (DP, {"fsdp_double_buffer": True}),
        (TOPOLOGIES["ep2"], {"megatron_fsdp_enable_fine_grained_param_gather": True}),
    ),
}  # fmt: skip
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


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_plain_modules_have_the_same_bits_on_any_ranks(rank: int, world: int) -> None:
    """Steps with gradients that are set, not computed."""
    side = Side(rank, world, "optim_grads_params")
    model, module, generator = side.model(net()), net(), torch.Generator().manual_seed(7)
    muon = side.optimizer(optimizers(model)[0])
    weights = {name: param.detach() for name, param in module.named_parameters()}
    reference = Reference(
        None, PLAIN_LR, DECAY, 0.0, 0.0, torch.bfloat16, momentum=0.9, nesterov=True,
        scale=lambda rows, columns: max(1, rows / columns) ** 0.5, orthogonalize=by_package,
        coefficients=coefficients_of("simple", 5),
    )  # fmt: skip
    for _ in range(3):
        model(tokens(0, 0, rank)).backward()
        for (name, weight), param in zip(weights.items(), model.parameters(), strict=True):
            value = torch.randn(weight.shape, generator=generator)
            if of_blocks(name, weight):
                ref = param.fsdp_layout_ref
                held = ref.layout.shard_range(ref.index, ref.rank)
                rows = value.view(-1)[held.start : held.stop].view_as(param._local_tensor)
                param.grad._local_tensor.copy_(rows)
                weights[name] = reference.muon(name, weight, weight, value)
        muon.step()
        model.zero_grad()
    found = side.weights()
    for name, value in weights.items():
        assert not of_blocks(name, value) or torch.equal(found[f"0 {name}"], value), name


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
