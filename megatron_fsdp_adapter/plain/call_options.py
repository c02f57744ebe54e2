"""The arguments of a call of `fully_shard`, and the sets of ranks that a model's calls name."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..core.comm.managed import Manages
from ..core.config import MixedPrecisionPolicy as Policy
from ..core.distributed_index import FSDPDistributedIndex
from ..core.duplicate_groups import duplicate_ranks
from ..core.runtime.rank_warnings import warn
from ..core.topology import DENSE, ShardDomain, WholeMesh
from .mesh import MeshGroups, rank_count, whole_mesh

FP32_SUMS = "reduce_scatter_with_fp32_accumulation"
"""Name of the argument that has sums of bfloat16 gradients in float32."""


SINCE_TORCH_2_15 = torch.__version__ >= (2, 15)  # type: ignore[operator]
"""True if torch's function has the dtypes of gradients of torch 2.15 and newer: these follow the
parameter, and no longer the compute dtype."""


@dataclass(frozen=True, eq=False)
class FullyShardOptions:
    """The arguments of one call of `fully_shard`.

    Attributes:
        groups: those of the shard axis and of the replicas.
        mesh: the mesh that parameters show; None if the engine makes one of `groups`.
        reshards: whether weights are resharded after forward.
        kept_over: number of ranks over which they are sharded then; None for all.
        is_auto: whether the call left that open, so that the root's stay.
        ignored: parameters that are not sharded.
        offload: whether main weights are in host memory, and an optimizer steps there.
        pins: whether that memory is page-locked, so that copies need not wait.
        device_type: type of the devices that have the shards.
        whole: the mesh of parameters that are DTensors over data-parallel dims, too.
        fp32_sums: whether sums of gradients over ranks are in float32, although they are sent in
            bfloat16.
        manager: torchft's, if this job is one of several replicas.
    """

    groups: MeshGroups
    mesh: DeviceMesh | None
    reshards: bool
    is_auto: bool
    policy: MixedPrecisionPolicy
    offload: bool
    ignored: frozenset[nn.Parameter]
    device_type: str
    whole: WholeMesh | None = None
    pins: bool = False
    kept_over: int | None = None
    fp32_sums: bool = False
    manager: Manages | None = None

    def __post_init__(self) -> None:
        if isinstance(self.policy, Policy):
            raise ValueError(
                f"mp_policy={self.policy}: is the policy of fully_shard_model. Import "
                "MixedPrecisionPolicy from torch.distributed.fsdp"
            )
        _ = self.grads_policy  # raises for dtypes that weights or gradients cannot have
        if self.fp32_sums and self.policy.reduce_dtype != torch.bfloat16:
            raise ValueError(
                f"{FP32_SUMS}=True with mp_policy.reduce_dtype={self.policy.reduce_dtype}: "
                "supports only gradients that are sent in bfloat16. Set "
                "reduce_dtype=torch.bfloat16, or leave the argument out"
            )
        if self.kept_over is not None:
            fewer_ranks(self.groups[0], self.kept_over)

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
        return replace(made, mesh=self.mesh or made.mesh, whole=self.whole, manager=self.manager)

    @functools.cached_property
    def grads_policy(self) -> Policy:
        """The engine's policy for parameters of this call. ValueError for a dtype that weights or
        gradients cannot have."""
        given = self.policy
        return Policy(
            main_params_dtype=None,
            grad_comm_dtype=given.reduce_dtype,
            compute_dtype=given.param_dtype,
            as_fsdp2=True,
            since_torch_2_15=SINCE_TORCH_2_15,
            fp32_sums=self.fp32_sums,
        )

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a parameter, where they stay between passes."""
        if not self.offload or rows.is_meta:
            return rows
        on_host = rows.cpu()
        return on_host.pin_memory() if self.pins and rows.device.type != "cpu" else on_host

    def over(self, info: Any) -> FullyShardOptions:
        """These options over the ranks of `info`, a `FSDPMeshInfo` of torch."""
        groups = (info.shard_process_group, getattr(info, "replicate_process_group", None))
        whole = None
        if getattr(info, "dp_mesh_dims", None) is not None:
            whole = whole_mesh(info.spmd_mesh, info.dp_mesh_dims)
        is_of_groups = info.mesh.ndim == len([group for group in groups if group is not None])
        mesh = info.mesh if is_of_groups else None
        if self.kept_over is not None:
            resharding(self.kept_over, groups[0])
        return replace(self, groups=groups, mesh=mesh, whole=whole)

    def of_the_model(self) -> dict[str, Any]:
        """The options that are the same for all modules of a model."""
        return {
            "offload_policy": self.offload,
            "elastic": self.manager,
        }


def resharding(
    after_forward: bool | int | None, group: dist.ProcessGroup
) -> tuple[bool, int | None]:
    """True if weights are resharded after forward, and the number of ranks of `group` over which
    they are kept until the backward; None for no such number, or for all ranks.

    ValueError for a number that does not divide the ranks."""
    if after_forward is None or isinstance(after_forward, bool):
        return after_forward is not False, None
    size = dist.get_world_size(group)
    if not isinstance(after_forward, int) or after_forward < 1 or size % after_forward:
        raise ValueError(
            f"reshard_after_forward={after_forward!r}: must be a bool, or a number of ranks that "
            f"divides the {size} ranks of the shard axis"
        )
    if after_forward == 1:
        warn(
            "reshard_after_forward=1 is a number of ranks, so weights stay gathered after forward, "
            "as with False. Pass True to reshard them"
        )
    is_between = 1 < after_forward < size
    return after_forward > 1, after_forward if is_between else None


_FEWER: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Any]] = weakref.WeakKeyDictionary()
"""Groups that `fewer_ranks` has made, by group and number of ranks."""


def fewer_ranks(group: dist.ProcessGroup, count: int) -> dist.ProcessGroup:
    """The group of `count` neighbors in `group` that this rank is one of. The first call for each
    number makes it, which is collective over the default group."""
    made = _FEWER.setdefault(group, {})
    if count not in made:
        ranks = dist.get_process_group_ranks(group)
        first = dist.get_rank(group) // count * count
        made[count] = duplicate_ranks(tuple(ranks[first : first + count]), "reshard_after_forward")
    return made[count]


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
