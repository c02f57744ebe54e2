"""How a domain's gradients are reduced, decided once, and one group's part of a launch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.runtime.comm import Pair

from .buffer import Copies
from .group import ParamGroup


class Collective(enum.Enum):
    """NONE: one rank has everything, which is scaled where it lies. EXCHANGE: an all-to-all, after
    which this package sums, scales and adds to the main gradients in one pass."""

    NONE = "none"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    EXCHANGE = "exchange"


class ScaleAt(enum.Enum):
    """What the domain's scale is applied to: what goes into the reduction; what comes out of it,
    where that has more bits than the main gradients, so that scaling adds no rounding; or the main
    gradients that it was put into. What is added to main gradients is scaled in the addition."""

    BUCKET = "bucket"
    RESULT = "result"
    SHARD = "shard"


@dataclass(frozen=True)
class ReducePlan:
    """Attributes:
    into_shard: a reduction whose gradient shard holds nothing yet ends in that shard: there is
        nothing to copy.
    """

    collective: Collective
    into_shard: bool
    scale: float
    scale_at: ScaleAt

    def scale_of(self, place: ScaleAt) -> float:
        """The factor that is due there."""
        return self.scale if place is self.scale_at else 1.0

    @property
    def scale_after(self) -> float:
        """The factor on what came out of the reduction."""
        return 1.0 if self.scale_at is ScaleAt.BUCKET else self.scale


def plan_reduction(config: EngineConfig, domain: str, grad_scale: float) -> ReducePlan:
    """For the groups of the domain of this name, with this scale."""
    is_single_rank, config = domain in config.whole, config.for_group(None, domain)
    comm, main = config.policy.comm_dtype, config.policy.grads_dtype
    if is_single_rank:
        collective = Collective.NONE
    elif config.fp32_accumulation or config.all_to_all_gradients:
        collective = Collective.EXCHANGE
    elif config.strategy.shard_main:
        collective = Collective.REDUCE_SCATTER
    else:
        collective = Collective.ALL_REDUCE
    if config.scale_before_sum:
        scale_at = ScaleAt.BUCKET
    else:
        scale_at = ScaleAt.RESULT if comm.itemsize > main.itemsize else ScaleAt.SHARD
    return ReducePlan(collective, comm == main, grad_scale, scale_at)


@dataclass(frozen=True)
class Reduction:
    """The part of `group` in a launch; one for each of a group's launches with the same buffers.

    Attributes:
        segments: what is communicated. results: what comes out, where that is not in the shard.
        adds: the gradient shard holds what came before in this step, to which the result is added.
        in_slot: `segments` lie in a slot, which may be registered with NCCL.
        pairs: output and input of a reduce-scatter.
    """

    group: ParamGroup
    plan: ReducePlan
    segments: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]
    adds: bool
    in_slot: bool = False

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        return list(zip(self.outputs, self.segments, strict=True))

    @functools.cached_property
    def _to_shards(self) -> Copies:
        return Copies(self.group.grad_segments)

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """What a reduce-scatter writes to."""
        in_shard = self.plan.into_shard and not self.adds
        return self.group.grad_segments if in_shard else self.results

    def scale_segments(self) -> None:
        """Before the reduction."""
        scale_each(self.segments, self.plan.scale_of(ScaleAt.BUCKET))

    def finish(self) -> None:
        """After the reduction: scales what came out and puts it into the main gradients, or adds it
        to what they hold. An exchange has done so."""
        plan, shards = self.plan, self.group.grad_segments
        if plan.collective is Collective.EXCHANGE:
            return
        if self.adds:
            for shard, result in zip(shards, self.results, strict=True):
                shard.add_(result, alpha=plan.scale_after)
            return
        scale_each(self.outputs, plan.scale_of(ScaleAt.RESULT))
        if not plan.into_shard:
            self._to_shards(self.results)
        scale_each(shards, plan.scale_of(ScaleAt.SHARD))


def scale_each(tensors: Sequence[torch.Tensor], scale: float) -> None:
    """One kernel each: see `copy_each`."""
    if scale != 1.0:
        for tensor in tensors:
            tensor.mul_(scale)
