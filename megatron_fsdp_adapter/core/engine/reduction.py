"""Reduction of a domain's gradients, decided once, and one group's part of a launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.runtime.comm import (
    ALL_REDUCE,
    ALONE,
    REDUCE_SCATTER,
    Communicator,
    Pair,
    Reduce,
)
from megatron_fsdp_adapter.core.topology import ShardDomain

from .buffer import FlatBuffer, copies_to
from .group import ParamGroup
from .launches import REDUCED, REDUCED_OUTER


@dataclass(frozen=True)
class DomainReduce:
    """The way in which the gradients of a domain are reduced over one axis.

    Attributes:
        kind: what a launch is called (`launches.py`).
        into_shard: a reduction whose gradient shard holds nothing yet ends in that shard: there is
            nothing to copy.
        scale: of the domain. scaled: what that is applied to: "sent", what is communicated;
            "result", what comes out, where that has more bits than the main gradients, so that
            scaling adds no rounding; or "shard", the main gradients that received it. A result
            that is added to main gradients is scaled in the addition.
        received: fixed memory for what is received of one bucket after the other.
    """

    kind: str
    communicator: Communicator
    way: Reduce
    into_shard: bool = False
    scale: float = 1.0
    scaled: str = "sent"
    received: FlatBuffer | None = None

    def factor(self, place: str) -> float:
        """The factor to apply at `place`."""
        return self.scale if place == self.scaled else 1.0

    @property
    def after(self) -> float:
        """The factor on what came out of the reduction."""
        return 1.0 if self.scaled == "sent" else self.scale


def domain_reduces(
    config: EngineConfig, domains: Mapping[str, ShardDomain],
    communicators: Mapping[str, Communicator], received: FlatBuffer | None,
) -> dict[str, DomainReduce]:
    """Over the shard axis of each domain."""
    found = {}
    for name, domain in domains.items():
        own = config.for_group(None, name)
        comm, main = own.policy.comm_dtype, own.policy.grads_dtype
        way = own.reduce_scatter if own.strategy.shard_main else ALL_REDUCE
        scaled = "result" if comm.itemsize > main.itemsize else "shard"
        found[name] = DomainReduce(
            REDUCED, communicators[name], ALONE if name in config.whole else way, comm == main,
            domain.grad_scale, "sent" if own.scale_before_sum else scaled, received,
        )
    return found


def outer_reduces(
    config: EngineConfig, communicators: Mapping[str, Communicator]
) -> dict[str, DomainReduce]:
    """Over outer axes, in place, of what has been reduced and scaled."""
    way = REDUCE_SCATTER if config.shard_outer else ALL_REDUCE
    return {name: DomainReduce(REDUCED_OUTER, one, way) for name, one in communicators.items()}


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
    reduce: DomainReduce
    segments: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]
    adds: bool = False
    in_slot: bool = False

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        return list(zip(self.outputs, self.segments, strict=True))

    @functools.cached_property
    def _to_shards(self) -> Callable[[Sequence[torch.Tensor]], None]:
        return copies_to(self.group.grad_segments)

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """The outputs of a reduce-scatter."""
        in_shard = self.reduce.into_shard and not self.adds
        return self.group.grad_segments if in_shard else self.results

    def receive(self, segment: torch.Tensor) -> torch.Tensor:
        """Memory for the pieces that other ranks send of a segment, of the segment's kind: NCCL
        hangs if one end of an exchange is registered and the other, of gradients that are kept, is
        not. Collectives that no stream orders may overlap, and so share no memory."""
        received = self.reduce.received
        if received is None or not self.in_slot or received.runtime.host_waits:
            return torch.empty_like(segment)
        received.forget()
        return received.tensor[: segment.nbytes].view(segment.dtype)

    def scale_segments(self) -> None:
        """Before the reduction."""
        scale_each(self.segments, self.reduce.factor("sent"))

    def finish(self) -> None:
        """After the reduction: scales what came out and puts it into the main gradients, or adds it
        to what they hold."""
        reduce, shards = self.reduce, self.group.grad_segments
        if reduce.way.into_shards:
            return
        if self.group.reduced_hook is not None and self.group.domain.outer is None:
            scale_each(self.outputs, reduce.after)
            self.run_hook()
            reduce = replace(reduce, scale=1.0)
        if self.adds:
            for shard, result in zip(shards, self.results, strict=True):
                shard.add_(result, alpha=reduce.after)
            return
        scale_each(self.outputs, reduce.factor("result"))
        if not reduce.into_shard:
            self._to_shards(self.results)
        scale_each(shards, reduce.factor("shard"))

    def run_hook(self) -> None:
        """Gives what came out to the group's hook."""
        for output in self.outputs:
            self.group.reduced_hook(output)  # type: ignore[misc]


def scale_each(tensors: Sequence[torch.Tensor], scale: float) -> None:
    """One kernel each: see `copies_to`."""
    if scale != 1.0:
        for tensor in tensors:
            tensor.mul_(scale)
