"""The same gradients give Muon's weights the same bits, however they are shared out.

Gradients of models that are split differently differ by the order of sums. Here they are set: every
rank takes its part of a tensor that is made for the whole parameter, by a name that is the same
everywhere. All cells are compared with one computation on whole tensors, and so with each other.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as ps
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_fsdp_adapter.prove.gather_full import plain_name
from megatron_fsdp_adapter.sharding.muon.newton_schulz import coefficients_of, orthogonalized
from tests.distributed.gpt import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.muon_reference import Reference, is_muons, own_part, tensor_group
from tests.distributed.test_muon_megatron import BF16, FP32, LR, Cell
from tests.distributed.topologies import (
    TOPOLOGIES,
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    run_schedule,
)

QUINTIC = coefficients_of("quintic", 5)
DECAY = 0.1


def check(rank: int, world: int, cells: tuple[Cell, ...], steps: int) -> None:
    for cell in cells:
        for strategy in cell.strategies:
            check_strategy(cell, strategy, steps)


def check_strategy(cell: Cell, strategy: str, steps: int) -> None:
    # Clipping would multiply by a norm, which is a sum in another order again.
    case = case_for(cell.topology, swiglu=True, lr=LR, weight_decay=DECAY, clip=0.0, tied=False)
    groups = case.heads if cell.topology.cp > 1 else 2  # the tests' attention over ranks
    init_topology(cell.topology, cell.ddp.get("num_distributed_optimizer_instances", 1))
    trainer = build_topology_trainer(
        cell.topology, case, strategy, ddp=cell.ddp, fields={"num_query_groups": groups},
        optimizer_options=cell.options,
    )  # fmt: skip
    names = global_names(trainer)
    trainer.load({local: own(pair, name, 0) for local, (name, pair) in names.items()})
    for step in range(1, steps + 1):
        run_schedule(trainer, step)
        for name, pair in names.values():
            if pair.sharded.grad is not None:
                set_gradient(pair, own(pair, name, step))
        assert trainer.optimizer.step()[0]
    found = trainer.weights()
    compared = 0
    for local, (name, pair) in names.items():
        if is_muons(name, pair.unsharded):
            whole = expected(cell, trainer.chunks[0].config, name, pair, steps)
            wanted = own_part(pair.unsharded, name, whole)
            difference = (found[local] - wanted).abs().max()
            label = f"{cell.topology.name}, {strategy}, {cell.ddp}: {name}"
            assert torch.equal(found[local], wanted), f"{label} is off by {difference:.1e}"
            compared += 1
    assert compared


def global_names(trainer: TopologyTrainer) -> dict[str, tuple[str, Any]]:
    """By the trainer's name of a parameter, that in the whole model, and the pair."""
    found = {}
    for number, chunk in enumerate(trainer.chunks):
        config = chunk.config
        first = get_transformer_layer_offset(config, number if trainer.topology.vpp else None)
        experts = (config.num_moe_experts or 0) // config.expert_model_parallel_size
        before = experts * ps.get_expert_model_parallel_rank()
        for pair in chunk.engine.pairs:
            local = plain_name(pair.managed.fqns[0])
            name = counted_on(counted_on(local, "layers", first), "local_experts", before)
            found[f"{number}.{local}"] = (name, pair)
    assert len({name for name, _ in found.values()}) == len(found)
    return found


def counted_on(name: str, what: str, before: int) -> str:
    """With the number behind `what` in the name raised by those that other ranks have before."""
    return re.sub(rf"(?<={what}\.)\d+", lambda at: str(int(at[0]) + before), name)


def made(pair: Any, name: str, step: int) -> torch.Tensor:
    """Of the whole parameter: its weight, for step 0, or gradient."""
    shape = list(pair.unsharded.shape)
    if getattr(pair.unsharded, "tensor_model_parallel", False):
        shape[pair.unsharded.partition_dim] *= tensor_group(name).size()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator) * 0.1


def own(pair: Any, name: str, step: int) -> torch.Tensor:
    """This rank's part under tensor parallelism."""
    return own_part(pair.unsharded, name, made(pair, name, step))


def set_gradient(pair: Any, value: torch.Tensor) -> None:
    local = pair.sharded.grad._local_tensor
    held = pair.sharded.megatron_fsdp_slice
    local.copy_(value.reshape(-1)[held].view(local.shape))


def expected(cell: Cell, config: Any, name: str, pair: Any, steps: int) -> torch.Tensor:
    """Muon on the whole parameter, with the package's own products, one matrix at a time."""
    of = Reference(config, LR, DECAY, eps=0.0, clip=0.0)
    weight = made(pair, name, 0)
    momentum = torch.zeros_like(weight)
    for step in range(1, steps + 1):
        momentum.lerp_(made(pair, name, step), 1 - of.momentum)
        weight.mul_(1 - LR * DECAY)
        for target, part in zip(
            of.parts_of(name, weight), of.parts_of(name, momentum), strict=True
        ):
            matrix = part.reshape(-1, weight.shape[1]).to(cell.dtype)
            [found] = orthogonalized(matrix[None], QUINTIC)
            target.add_(found.view(part.shape), alpha=-LR * of.scale(*matrix.shape))
    return weight


HYBRID = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}
REPLICAS = {**HYBRID, "outer_dp_sharding_strategy": "no_shard"}
ZERO_3 = ("optim_grads_params",)

TWO_RANKS = (
    Cell(Topology("dp2"), ("no_shard", "optim_grads_params"), options=BF16),
    *(Cell(TOPOLOGIES[name], ZERO_3, options=BF16) for name in ("tp2", "ep2", "pp2")),
)


def test_two_ranks_of_data_tensors_experts_and_stages_step_bit_for_bit_alike() -> None:
    run_ranks(check, 2, TWO_RANKS, 2)


NAMES = {
    1: (), 2: ("tp2", "tp2-sp", "ep2", "pp2", "cp2"), 3: (),
    4: ("tp2", "ep2", "ep4", "ep2-etp2", "pp2", "pp2-vpp2", "tp2-pp2", "ep2-pp2"),
}  # fmt: skip
"""Of topologies, by the number of ranks, beside data parallelism alone and, on four ranks, two
instances."""


@pytest.mark.full
@pytest.mark.parametrize("options", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("world", NAMES)
def test_every_split_under_every_strategy_steps_bit_for_bit_alike(
    world: int, options: dict[str, Any]
) -> None:
    experts, dp = Topology("experts", experts=4), Topology("dp")
    strategies = STRATEGIES if world < 4 else ZERO_3
    cells = [
        Cell(dp, STRATEGIES, options=options),
        *(Cell(topology, strategies, options=options)
          for topology in (experts, *(TOPOLOGIES[name] for name in NAMES[world]))),
    ]  # fmt: skip
    if world == 4:
        cells += [
            Cell(topology, STRATEGIES if topology == dp else ZERO_3, ddp, options)
            for topology in (dp, experts, TOPOLOGIES["tp2"])
            for ddp in (HYBRID, REPLICAS)
        ]
    run_ranks(check, world, tuple(cells), 5, timeout=500.0)
