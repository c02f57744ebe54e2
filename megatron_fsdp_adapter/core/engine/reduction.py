"""Reductions of a domain's gradients over one axis, and one group's part in a launch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_fsdp_adapter.core.comm.all_to_all_sum import ALL_TO_ALL_SUM
from megatron_fsdp_adapter.core.comm.communicator import (
    ALL_REDUCE,
    ALONE,
    AVERAGE,
    REDUCE_SCATTER,
    Communicator,
    Pair,
    Reduce,
)
from megatron_fsdp_adapter.core.config import FURTHER_DTYPES, EngineConfig

from .buffer import FlatBuffer, copies_to
from .group import ParamGroup


class Scaled(enum.Enum):
    """The tensors that a domain's scale is applied to."""

    # What is communicated.
    SENT = "sent"
    # What comes out of the reduction. It has more bits than the main gradients, so scaling adds no
    # rounding. Where it is added to main gradients, the addition scales it, as for `MAIN`.
    RESULT = "result"
    # The main gradients that received the result.
    MAIN = "main"


@dataclass(frozen=True)
class DomainReduce:
    """The way in which the gradients of a domain are reduced over one axis."""

    # What a launch is called (`launches.py`).
    kind: str
    # Of its ranks on that axis.
    communicator: Communicator
    # The collective.
    way: Reduce
    # Whether a reduction may write into the main gradients, if those hold nothing yet, and so needs
    # no copy.
    writes_main: bool = False
    # The factor on the sum of the ranks' gradients.
    scale: float = 1.0
    # What that is applied to.
    scaled: Scaled = Scaled.SENT
    # A further factor, on what is communicated.
    before: float = 1.0
    # Fixed memory for what is received of one bucket after the other.
    received: FlatBuffer | None = None

    def of(self, config: EngineConfig, scale: float) -> DomainReduce:
        """The way for groups with this configuration, whose sums get the factor `scale`."""
        policy = config.policy
        comm = policy.comm_dtype
        main = policy.grads_dtype
        scaled = Scaled.MAIN
        if policy.as_fsdp2 or comm.itemsize > main.itemsize:
            scaled = Scaled.RESULT
        if config.scale_before_sum:
            scaled = Scaled.SENT
        before = 1.0
        if policy.as_fsdp2 and comm in FURTHER_DTYPES:
            before = part_before_sum(scale)
        way = self.way
        if policy.fp32_sums and way is REDUCE_SCATTER:
            way = ALL_TO_ALL_SUM
        elif self._may_average(config, scaled, scale):
            way = AVERAGE
            scale = 1.0
        return replace(
            self,
            way=way,
            writes_main=comm == main,
            scale=scale / before,
            scaled=scaled,
            before=before,
        )

    def _may_average(self, config: EngineConfig, scaled: Scaled, scale: float) -> bool:
        """True if the collective may apply the factor. It does under torch's FSDP2, in these
        dtypes: a pass over the sums less."""
        policy = config.policy
        if self.way is not REDUCE_SCATTER or not self.communicator.averages:
            return False
        is_as_there = policy.as_fsdp2 and policy.comm_dtype not in FURTHER_DTYPES
        is_mean = scaled is Scaled.RESULT and scale == 1.0 / self.communicator.size
        return is_as_there and is_mean

    def to_partial(self, dtype: torch.dtype) -> DomainReduce:
        """This way, if it gives sums in `dtype` that are still to be reduced over an outer axis. As
        torch's FSDP2, it leaves a part of the factor to be applied after that (`after_outer`)."""
        return replace(self, writes_main=True, scale=self.scale / self.after_outer(dtype))

    def after_outer(self, dtype: torch.dtype) -> float:
        """The factor on partial sums in `dtype` after a reduction over an outer axis."""
        return self.scale if dtype in FURTHER_DTYPES else 1.0

    def factor(self, place: Scaled) -> float:
        """The factor to apply at `place`."""
        own = self.scale if place is self.scaled else 1.0
        return own * self.before if place is Scaled.SENT else own

    @property
    def total(self) -> float:
        """All factors on the sum."""
        return self.scale * self.before

    @property
    def after(self) -> float:
        """The factor to apply after the reduction, at whatever place."""
        return 1.0 if self.scaled is Scaled.SENT else self.scale


@dataclass(frozen=True)
class Reduction:
    """The part of `group` in a launch. All launches with the same buffers share one of these."""

    # Whose gradients these are.
    group: ParamGroup
    # How its domain is reduced over the axis.
    reduce: DomainReduce
    # What is communicated.
    segments: Sequence[torch.Tensor]
    # What comes out, where that is not in the main gradients.
    results: Sequence[torch.Tensor]
    # Whether main gradients hold what came before in this step, to which the result is added.
    adds: bool = False
    # Whether what comes out is to be in `GradBuffers.partial`, and not in the main gradients.
    is_partial: bool = False
    # Whether `segments` lie in a slot, which may be registered with NCCL.
    in_slot: bool = False

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        """Output and input of a reduce-scatter."""
        return list(zip(self.outputs, self.segments, strict=True))

    @functools.cached_property
    def only_reads(self) -> bool:
        """True if the reduction only reads what is communicated: nothing there is scaled, and
        results have another place."""
        reduce = self.reduce
        has_place = reduce.way.finishes or (reduce.writes_main and not self.adds)
        scatters = reduce.way not in (ALONE, ALL_REDUCE)
        return scatters and has_place and reduce.factor(Scaled.SENT) == 1.0

    @functools.cached_property
    def _copy_to_main(self) -> Callable[[Sequence[torch.Tensor]], None]:
        return copies_to(self.main)

    @functools.cached_property
    def main(self) -> Sequence[torch.Tensor]:
        """The main gradients that the result is put into or added to, or partial ones."""
        grads = self.group.grads
        if self.is_partial:
            return grads.partial.segments(grads.shards.inner)  # type: ignore[union-attr]
        return grads.inner_segments

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """The outputs of a reduce-scatter."""
        if self.reduce.writes_main and not self.adds:
            return self.main
        return self.results

    def receive(self, segment: torch.Tensor) -> torch.Tensor:
        """Memory for the pieces of `segment` that other ranks send.

        It is fixed memory only if the segment is in a slot too: NCCL hangs if one end of an
        exchange is registered and the other is not. If the host waits for collectives, several may
        run at once, so they share no memory."""
        received = self.reduce.received
        if received is None or not self.in_slot or received.runtime.host_waits:
            return torch.empty_like(segment)
        received.forget()
        return received.tensor[: segment.nbytes].view(segment.dtype)

    def scale_segments(self) -> None:
        """Scales what is communicated, if that is to be scaled. Must run before the reduction."""
        scale_each(self.segments, self.reduce.factor(Scaled.SENT))

    def finish(self) -> None:
        """Scales what came out of the reduction, and puts it into the main gradients or adds it to
        them. Runs after the reduction."""
        reduce = self.reduce
        if reduce.way.finishes:  # it has done all that
            return
        group = self.group
        if group.grads.reduced_hook is not None and not group.domain.has_replicas:
            scale_each(self.outputs, reduce.after)
            self.run_hook()
            reduce = replace(reduce, scale=1.0)  # the hook needs the mean, so it was scaled before
        if self.adds:
            for main, result in zip(self.main, self.results, strict=True):
                self._add(main, result, reduce.after)
            return
        scale_each(self.outputs, reduce.factor(Scaled.RESULT))
        if not reduce.writes_main:
            self._copy_to_main(self.results)
        scale_each(self.main, reduce.factor(Scaled.MAIN))

    def add_partial(self, scale: float, adds: bool) -> None:
        """Casts what came out of a reduction of partial sums over an outer axis, times `scale`, to
        the main gradients. adds: they have gradients, to which it is added."""
        for main, result in zip(self.group.grads.inner_segments, self.results, strict=True):
            if adds:
                self._add(main, result, scale)
            else:
                scale_each([result], scale)
                main.copy_(result)

    def _add(self, main: torch.Tensor, result: torch.Tensor, scale: float) -> None:
        """Adds the result of a segment to the main gradients. FSDP2 rounds it to their dtype before
        that."""
        if not self.group.config.policy.as_fsdp2 or self.reduce.writes_main:
            main.add_(result, alpha=scale)
            return
        scale_each([result], scale)
        is_exact = torch.promote_types(result.dtype, main.dtype) == main.dtype
        main.add_(result if is_exact else result.to(main.dtype))

    def run_hook(self) -> None:
        """Calls the group's hook with what came out. There must be a hook."""
        for output in self.outputs:
            self.group.grads.reduced_hook(output)  # type: ignore[misc]


@dataclass(frozen=True)
class InFlight:
    """A reduction that was launched."""

    # Groups whose buckets it reads.
    groups: Sequence[ParamGroup]
    # After which they may be freed.
    event: Any
    # Memory of no group, which is kept alive until then.
    buffers: Sequence[FlatBuffer | torch.Tensor] = ()

    def uses_memory_of(self, groups: Sequence[ParamGroup]) -> bool:
        """True if the bucket of any of `groups` lies where one of these does."""
        for one in self.groups:
            for group in groups:
                if _same_memory(one, group):
                    return True
        return False


def _same_memory(one: ParamGroup, other: ParamGroup) -> bool:
    slot = one.grads.slot.number
    return one is other or (slot is not None and slot == other.grads.slot.number)


def largest_domain_first(parts: Sequence[Reduction]) -> list[list[Reduction]]:
    """The parts of each domain, the domain with most elements first; equal on all ranks.

    Only a kernel that is launched between two units finds room beside compute at once: the next
    one waits for a large GEMM to end. On 4 GPUs that was 2 ms of a reduction's 7.
    """
    found: dict[str, list[Reduction]] = {}
    for part in parts:
        found.setdefault(part.group.key.domain, []).append(part)
    return sorted(found.values(), key=_numel, reverse=True)


def _numel(parts: Sequence[Reduction]) -> int:
    return sum(part.group.layout.total_numel for part in parts)


def part_before_sum(scale: float) -> float:
    """The part of a factor on sums that is applied before summing, as by torch's FSDP2: about its
    root, and a power of two, so that sums in float16 do not overflow."""
    count = 1.0 / scale
    divisor = 1.0
    while count % divisor == 0 and count / divisor > divisor:
        divisor *= 2
    return 1.0 / divisor


def scale_each(tensors: Sequence[torch.Tensor], scale: float) -> None:
    """Multiplies each tensor by `scale`, by a kernel each: see `copies_to`."""
    if scale != 1.0:
        for tensor in tensors:
            tensor.mul_(scale)
