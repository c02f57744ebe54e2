"""Every process group, read once: the domain of each kind of parameter."""

from __future__ import annotations

import torch.distributed as dist

from .topology import DENSE, EXPERT, OUTER_DIM, SHARD_DIM, TP_DIM, Axis, ShardDomain, mesh_over

OptionalGroup = dist.ProcessGroup | None


class FSDPDistributedIndex:
    """The process groups of a wrapper, for dense parameters and for experts.

    The wrappers make one from their arguments. It is public for programs that make groups of their
    own.

    Examples:
        >>> index = FSDPDistributedIndex(dist.group.WORLD, device_type="cpu", grad_scale=0.5)
        >>> index.domains["dense"].axis.size  # two ranks share the dense parameters
        2

    Args:
        fsdp_group: the group that shards dense parameters: ranks of data and context parallelism,
            in one optimizer instance if there are several.
        fsdp_group_ag: another communicator of the same ranks, for all-gathers.
        fsdp_group_rs: another communicator of the same ranks, for reductions.
        expt_fsdp_group: the group that shards expert parameters. None: the model has no experts.
        expt_fsdp_group_ag: as `fsdp_group_ag`, for experts.
        expt_fsdp_group_rs: as `fsdp_group_rs`, for experts.
        outer_fsdp_group: the ranks that hold the same dense shard, one of each optimizer instance.
            None: there is one instance.
        expt_outer_fsdp_group: as `outer_fsdp_group`, for experts.
        dp_group: all ranks with the same dense parameters. None: those of `fsdp_group`.
        expt_dp_group: all ranks with the same experts. None: those of `expt_fsdp_group`.
        tp_group: the tensor-parallel group. None: no tensor parallelism.
        expt_tp_group: the tensor-parallel group of experts. None: it is not split.
        device_type: "cuda" or "cpu".
        grad_scale: a factor for sums of gradients over ranks. It is the same for experts: their
            gradients contain the tokens of all expert-parallel ranks already.
        hsdp_outer_dp_shard: True splits dense shards again over `outer_fsdp_group`.
        expt_hsdp_outer_dp_shard: as `hsdp_outer_dp_shard`, for experts.

    Raises:
        ValueError: groups that must have the same ranks in the same order do not; an outer group
            shares more than this rank with its shard group; or groups form no mesh.
    """

    def __init__(
        self,
        fsdp_group: dist.ProcessGroup,
        *,
        device_type: str,
        grad_scale: float,
        fsdp_group_ag: OptionalGroup = None,
        fsdp_group_rs: OptionalGroup = None,
        expt_fsdp_group: OptionalGroup = None,
        expt_fsdp_group_ag: OptionalGroup = None,
        expt_fsdp_group_rs: OptionalGroup = None,
        outer_fsdp_group: OptionalGroup = None,
        expt_outer_fsdp_group: OptionalGroup = None,
        dp_group: OptionalGroup = None,
        expt_dp_group: OptionalGroup = None,
        tp_group: OptionalGroup = None,
        expt_tp_group: OptionalGroup = None,
        hsdp_outer_dp_shard: bool = False,
        expt_hsdp_outer_dp_shard: bool = False,
    ) -> None:
        self.hybrid_fsdp_group = outer_fsdp_group
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        # By kind of parameter, whether shards are split again over the outer axis, if there is one.
        self._splits_outer = {DENSE: hsdp_outer_dp_shard, EXPERT: expt_hsdp_outer_dp_shard}
        # By kind, the group over optimizer instances; None with one instance.
        self._outer_groups = {DENSE: outer_fsdp_group, EXPERT: expt_outer_fsdp_group}
        self.tp_group = tp_group
        # By kind of parameter, the group over which tensors are split before they are sharded.
        self.tensor_groups = {DENSE: tp_group, EXPERT: expt_tp_group}
        # By kind, all ranks with the same parameters; None where that is the shard group.
        self._everyone = {DENSE: dp_group, EXPERT: expt_dp_group}
        # By kind of which there are groups.
        self.domains: dict[str, ShardDomain] = {}
        of_kinds = {
            DENSE: (fsdp_group, fsdp_group_ag, fsdp_group_rs),
            EXPERT: (expt_fsdp_group, expt_fsdp_group_ag, expt_fsdp_group_rs),
        }
        for kind, (group, gather, reduce) in of_kinds.items():
            if group is not None:
                domain = self._domain(kind, group, gather, reduce, device_type, grad_scale)
                self.domains[kind] = domain

    def _domain(
        self,
        kind: str,
        group: dist.ProcessGroup,
        gather: OptionalGroup,
        reduce: OptionalGroup,
        device_type: str,
        grad_scale: float,
    ) -> ShardDomain:
        if gather is None:
            gather = group
        if reduce is None:
            reduce = group
        shard = Axis.of(SHARD_DIM, group)
        axes = [shard]
        outer = None
        across = self._outer_groups[kind]
        if across is not None:
            outer = Axis.of(OUTER_DIM, across)
            axes = [outer, shard]
        split_over = self.tensor_groups[kind]
        if split_over is not None:
            tensor = Axis.of(TP_DIM, split_over)
            if tensor.size > 1:
                axes.append(tensor)
        return ShardDomain(
            name=kind,
            axis=shard,
            gather_group=gather,
            reduce_group=reduce,
            mesh=mesh_over(axes, device_type),
            grad_scale=grad_scale,
            outer=outer,
        )

    @staticmethod
    def _kind(is_expert_parallel: bool) -> str:
        return EXPERT if is_expert_parallel else DENSE

    def domain(self, kind: str) -> ShardDomain:
        """The domain of parameters of `kind`; ValueError when the groups for it are missing."""
        if kind not in self.domains:
            raise ValueError(
                f"a parameter is of kind {kind!r}, but the process groups give only "
                f"{sorted(self.domains)}. Pass expt_dp in pg_collection"
            )
        return self.domains[kind]

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup:
        """The group of the shards, or with `independent_all_gather` the one gathers run on."""
        domain = self.domain(self._kind(is_expert_parallel))
        if independent_all_gather:
            return domain.gather_group
        return domain.axis.group

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """All ranks that hold the same parameters: without an outer axis, the shard group."""
        everyone = self._everyone[self.domain(self._kind(is_expert_parallel)).name]
        if everyone is None:
            return self.get_fsdp_group(is_expert_parallel)
        return everyone

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> OptionalGroup:
        """The outer data-parallel group of dense or of expert parameters; None without one."""
        return self._outer_groups[self._kind(is_expert_parallel)]

    @property
    def repeats_alike(self) -> bool:
        """True if parameters of every kind are repeated in equally many instances, or in one."""
        sizes = {domain.outer_size for domain in self.domains.values()}
        return len(sizes) == 1 and not any(self.splits_outer(kind) for kind in self.domains)

    def splits_outer(self, kind: str) -> bool:
        """True if shards of this kind are split again over their outer axis."""
        return self._splits_outer[kind] and self.domain(kind).outer is not None
