"""Which modules are sharded, which are replicated, and which are left alone.

A replicated module has whole main weights and optimizer state on every rank; its gradients are
summed over all of them once a step. That is the engine's outer axis over shards that have one rank
each, so nothing in the engine knows of it. A module that is left alone keeps its parameters as
they are: no buffers, no communication, no optimizer; it must be frozen.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from ..core.topology import (
    OUTER_DIM,
    SHARD_DIM,
    TP_DIM,
    Axis,
    FSDPDistributedIndex,
    ShardDomain,
    mesh_over,
)

SHARD, REPLICATE, LEAVE = "shard", "replicate", "leave"
PLACEMENTS = (SHARD, REPLICATE, LEAVE)
ARGUMENT = "module_placements"


@dataclass(frozen=True)
class Placements:
    """Patterns of module names (those of `named_modules()`, shell wildcards, a Float16Module's
    level left out) and what to do with what is below such a module; later ones win."""

    chosen: Mapping[str, str] = field(default_factory=dict)

    def of(self, fqn: str) -> str:
        """The placement of the parameter of this name: that of the modules that hold it."""
        found = SHARD
        for pattern, placement in self.chosen.items():
            if any(fnmatch.fnmatchcase(name, pattern) for name in _holders(fqn)):
                found = placement
        return found

    def manages(self, fqn: str) -> bool:
        """Whether the parameter of this name is the wrapper's: it is not left alone."""
        return self.of(fqn) != LEAVE

    def problems(self, module: nn.Module, shards_outer: bool) -> list[str]:
        """What is wrong with them for `module`."""
        names = {name for fqn, _ in module.named_parameters() for name in _holders(fqn)}
        found = []
        for pattern, placement in self.chosen.items():
            given = f"{ARGUMENT}={{{pattern!r}: {placement!r}}}"
            if placement not in PLACEMENTS:
                found.append(f"{given}: use one of {list(PLACEMENTS)}")
            if not fnmatch.filter(names, pattern):
                found.append(
                    f"{given}: no module with parameters has such a name; names are those of "
                    f"named_modules(), {sorted(names)[:3]} for example"
                )
        if shards_outer and REPLICATE in self.chosen.values():
            found.append(
                f"{ARGUMENT} with 'replicate' and outer_dp_sharding_strategy='optim': the outer "
                "axis cannot split what is replicated; use 'no_shard' there"
            )
        return found + self._conflicts(module)

    def _conflicts(self, module: nn.Module) -> list[str]:
        found, placed = [], dict[int, tuple[str, str]]()
        for fqn, param in module.named_parameters(remove_duplicate=False):
            placement = self.of(fqn)
            first, before = placed.setdefault(id(param), (fqn, placement))
            if placement != before:
                found.append(
                    f"{ARGUMENT}: {first} and {fqn} are one parameter, but placed as {before!r} "
                    f"and {placement!r}; place both modules alike"
                )
            elif placement == LEAVE and param.requires_grad:
                found.append(
                    f"{ARGUMENT}: {fqn} is to be left alone, but requires a gradient, which nobody "
                    "would reduce; freeze it, or use 'replicate'"
                )
            if placement == REPLICATE and getattr(param, "shared_embedding", False):
                found.append(
                    f"{ARGUMENT}: {fqn} is shared with another pipeline stage and cannot be "
                    "replicated; use 'shard'"
                )
        return found[:8]


def _holders(fqn: str) -> list[str]:
    """The modules that hold a parameter, from the whole model down, without wrappers' levels."""
    parts = fqn.split(".")[:-1]
    while parts[:1] == ["module"]:
        parts = parts[1:]
    return ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]


def replicated_name(kind: str) -> str:
    """Of the domain of replicated parameters of `kind`."""
    return f"{kind}, replicated"


def replicated_domain(kind: str, index: FSDPDistributedIndex, device_type: str) -> ShardDomain:
    """The domain in which each rank has a shard of its own, the whole, and all data-parallel ranks
    are replicas. Makes a group of this rank alone; no other rank takes part in that."""
    sharded = index.domain(kind)
    alone = dist.new_group(
        [dist.get_rank()], use_local_synchronization=True, group_desc="REPLICATED"
    )
    axis = Axis.of(SHARD_DIM, alone)
    outer = Axis.of(OUTER_DIM, index.kinds[kind].everyone or sharded.reduce_group)
    axes = [outer, axis]
    if sharded.mesh.mesh_dim_names[-1] == TP_DIM:  # type: ignore[index]
        axes.append(Axis.of(TP_DIM, sharded.mesh.get_group(TP_DIM)))
    return ShardDomain(
        name=replicated_name(kind),
        axis=axis,
        gather_group=alone,
        reduce_group=alone,
        mesh=mesh_over(axes, device_type),
        grad_scale=sharded.grad_scale,
        outer=outer,
    )
