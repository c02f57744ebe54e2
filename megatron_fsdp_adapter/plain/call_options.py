"""The arguments of a call of `fully_shard`, and the sets of ranks that a model's calls name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..core.config import MixedPrecisionPolicy as Policy
from ..core.distributed_index import FSDPDistributedIndex
from ..core.topology import DENSE, ShardDomain
from .mesh import MeshGroups, rank_count


@dataclass(frozen=True, eq=False)
class FullyShardOptions:
    """The arguments of one call of `fully_shard`.

    Attributes:
        groups: those of the shard axis and of the replicas.
        mesh: the mesh that parameters show; None if the engine makes one of `groups`.
        reshards: whether weights are resharded after forward.
        ignored: parameters that are not sharded.
        device_type: type of the devices that have the shards.
    """

    groups: MeshGroups
    mesh: DeviceMesh | None
    reshards: bool
    policy: MixedPrecisionPolicy
    offload: bool
    ignored: frozenset[nn.Parameter]
    device_type: str

    def __post_init__(self) -> None:
        _check_compute_dtype(self.policy.param_dtype)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to which inputs are cast; None if they are not."""
        return self.policy.param_dtype if self.policy.cast_forward_inputs else None

    @functools.cached_property
    def domain(self) -> ShardDomain:
        """The ranks that share parameters, and the scale of their gradients."""
        shard, outer = self.groups
        index = FSDPDistributedIndex(
            shard,
            device_type=self.device_type,
            outer_fsdp_group=outer,
            grad_scale=1.0 / rank_count(self.groups),
        )
        made = index.domain(DENSE)
        return replace(made, mesh=self.mesh or made.mesh)

    def over(self, info: Any) -> FullyShardOptions:
        """These options over the ranks of `info`, a `FSDPMeshInfo` of torch."""
        groups = (info.shard_process_group, getattr(info, "replicate_process_group", None))
        if info.mesh.ndim == len([group for group in groups if group is not None]):
            return replace(self, groups=groups, mesh=info.mesh)
        return replace(self, groups=groups, mesh=None)

    def of_the_model(self) -> dict[str, Any]:
        """The options that are the same for all modules of a model."""
        return {
            "mp_policy.reduce_dtype": self.policy.reduce_dtype,
            "offload_policy": self.offload,
        }


def _check_compute_dtype(dtype: torch.dtype | None) -> None:
    """Raises ValueError for a dtype that weights cannot have in a forward."""
    Policy(compute_dtype=dtype)  # the engine's policy, which raises when it is made


class ModelDomains(dict[str, ShardDomain]):
    """The sets of ranks that share parameters of a model, by names. The root's is DENSE."""

    def name_of(self, domain: ShardDomain) -> str:
        """The name of a domain, which is added if there is none over its ranks."""
        for name, known in self.items():
            if _ranks_of(known) == _ranks_of(domain):
                return name
        name = f"{DENSE} {len(self) + 1}"
        self[name] = domain
        return name


def _ranks_of(domain: ShardDomain) -> tuple[Sequence[int], Sequence[int]]:
    outer = domain.outer
    return tuple(domain.axis.ranks), () if outer is None else tuple(outer.ranks)
