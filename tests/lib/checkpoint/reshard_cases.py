"""A model's whole state, put together and taken apart by rules of this file's own.

Nothing of the package's naming or slicing is used: what a checkpoint moves from one split of a
model to another is compared with what these rules say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state as ps

from megatron_fsdp_adapter.megatron.options.table import (
    EXPERT_INSTANCES,
    EXPERT_OUTER,
    EXPERT_STRATEGY,
)
from tests.lib.gpt.checkpoints import saved
from tests.lib.gpt.gather_full import full_values
from tests.lib.gpt.gpt import STRATEGIES, Case
from tests.lib.gpt.topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    global_name,
    init_topology,
    local_of,
    topology_step,
)
from tests.lib.ranks.groups import destroy_groups, everyones

FIELDS = ("weight", "exp_avg", "exp_avg_sq", "step")
Whole = dict[str, dict[str, torch.Tensor]]
"""Parameter of the unsplit model -> its weight and its optimizer state."""

COLUMN = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_fc1.bias",
)
ROW = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class Split:
    """One way to train: a topology on so many processes, a strategy, optimizer instances."""

    name: str
    world: int
    topology: Topology
    strategy: str
    instances: int = 1
    outer: str = "no_shard"
    of_experts: str | None = None
    expert_instances: int | None = None
    expert_outer: str | None = None
    case: Mapping[str, Any] = field(default_factory=dict)


def case_of(split: Split) -> Case:
    """The same model for every split without experts, and for every split with them: only its
    padded vocabulary may be changed."""
    moe = bool(split.topology.experts)
    options = {"tied": not moe, "swiglu": moe, "bias": not moe, **split.case}
    sizes = Case(num_layers=4, hidden=24, heads=4, ffn=44, vocab=54, seq=8, batch=2, microbatches=2)
    return sizes.but(**options)


def trainer_of(split: Split, **options: Any) -> TopologyTrainer:
    """With its groups, in place of those of the split before; collective. options: of
    `build_topology_trainer`."""
    destroy_groups()
    init_topology(split.topology, split.instances)
    ddp = {
        "num_distributed_optimizer_instances": split.instances,
        "outer_dp_sharding_strategy": split.outer,
        EXPERT_STRATEGY: split.of_experts,
        EXPERT_INSTANCES: split.expert_instances,
        EXPERT_OUTER: split.expert_outer,
    }
    case = case_of(split)
    return build_topology_trainer(split.topology, case, split.strategy, ddp=ddp, **options)


def _tensor_parallel(name: str) -> tuple[int, int]:
    """This rank's place in the group that splits `name`, and the group's size."""
    if ".local_experts." in name:
        return ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
    return ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()


def _dim(name: str) -> int | None:
    if name.endswith(COLUMN):
        return 0
    return 1 if name.endswith(ROW) else None


def _joined(name: str, parts: list[torch.Tensor], gated: bool) -> torch.Tensor:
    dim = _dim(name)
    if dim is None or parts[0].dim() == 0:
        for part in parts:
            assert torch.equal(part, parts[0]), f"{name} differs over ranks"
        return parts[0]
    if gated and ".linear_fc1." in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    return torch.cat(parts, dim)


def whole_state(trainer: TopologyTrainer) -> Whole:
    """Of one of ours, the same on every rank; collective."""
    trainer.optimizer.sharded_state_dict(
        {}, is_loading=True, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"}
    )  # makes the state
    adam = trainer.optimizer.optimizer.state
    values = {"weight": trainer.params()}
    for moment in ("exp_avg", "exp_avg_sq"):
        values[moment] = full_values(
            trainer._pairs(), lambda pair, m=moment: local_of(adam[pair.sharded][m])
        )
    values["step"] = {n: adam[pair.sharded]["step"].clone() for n, pair in trainer._pairs()}
    mine = []
    for what, tensors in values.items():
        for name, value in tensors.items():
            mine.append((global_name(trainer, name), _tensor_parallel(name), what, value))
    return _whole_of(everyones(mine), trainer.case.swiglu)


def _whole_of(everyones: list[Any], gated: bool) -> Whole:
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for entry in (entry for mine in everyones for entry in mine):
        name, (rank, _), what, value = entry
        known = parts.setdefault((name, what), {}).setdefault(rank, value)
        assert torch.equal(known, value), f"{what} of {name} differs between replicas"
    whole: Whole = {}
    for (name, what), by_rank in sorted(parts.items()):
        ordered = [by_rank[rank] for rank in sorted(by_rank)]
        whole.setdefault(name, {})[what] = _joined(name, ordered, gated)
    return whole


def differences(ours: Whole, expected: Whole) -> list[str]:
    """What is not the same bits."""
    if set(ours) != set(expected):
        found = [f"names: {sorted(set(ours) ^ set(expected))}"]
    else:
        found = []
    return found + [
        f"{what} of {name}"
        for name in sorted(set(ours) & set(expected))
        for what in FIELDS
        if not torch.equal(ours[name][what], expected[name][what])
    ]


TRAINED = 2
ZERO0, ZERO1, ZERO2, ZERO3 = STRATEGIES


def split_of(
    world: int,
    strategy: str,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 0,
    outer: str | None = None,
    cp: int = 1,
    etp: int | None = None,
) -> Split:
    """ep: 0 for the dense model. outer: of two optimizer instances; None for one. Experts with
    tensor parallelism are split over it too, unless etp says otherwise."""
    experts = 4 if ep else None
    if ep:
        if etp is None:
            etp = tp
        else:
            etp = etp
    else:
        etp = None
    topology = Topology(
        "",
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        ep=max(ep, 1),
        etp=etp,
        sp=tp > 1,
        experts=experts,
        dispatcher="allgather" if (etp or 1) > 1 else "alltoall",
        aligned=pp > 1,
    )
    axes = {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp or 1, "ep": ep, "etp": etp or 1}
    parts = [f"{name}{size}" for name, size in axes.items() if size > 1]
    outer_name = {None: [], "no_shard": ["hsdp"], "optim": ["hybrid"]}[outer]
    dp = world // (tp * cp * pp)
    name = "-".join(["moe" if ep else "dense", f"dp{dp}", strategy, *parts, *outer_name])
    return Split(name, world, topology, strategy, 2 if outer else 1, outer or "no_shard")


def save_split(rank: int, root: str, split: Split) -> None:
    trainer = trainer_of(split)
    for step in range(TRAINED):
        topology_step(trainer, step)
    saved(trainer, f"{root}/{split.name}", TRAINED, iteration=TRAINED)
    whole = whole_state(trainer)
    if rank == 0:
        torch.save(whole, f"{root}/{split.name}.pt")
