"""Reductions of a domain's gradients over one axis, and one group's part in a launch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_fsdp_adapter.core.comm.communicator import Communicator, Pair, Reduce

from .buffer import FlatBuffer, copies_to
from .group import ParamGroup


class Scaled(enum.Enum):
    """The tensors that a domain's scale is applied to."""

    # What is communicated.
    SENT = "sent"
    # What comes out, where that has more bits than the main gradients, so that scaling adds no
    # rounding. Like `MAIN` in the addition, if it is added to main gradients.
    RESULT = "result"
    # The main gradients that received it.
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
    # Whether a reduction whose main gradients hold nothing yet ends in them: there is nothing to
    # copy.
    writes_main: bool = False
    # The factor on the sum of the ranks' gradients.
    scale: float = 1.0
    # What that is applied to.
    scaled: Scaled = Scaled.SENT
    # Fixed memory for what is received of one bucket after the other.
    received: FlatBuffer | None = None

    def factor(self, place: Scaled) -> float:
        """The factor to apply at `place`."""
        return self.scale if place is self.scaled else 1.0

    @property
    def after(self) -> float:
        """The factor on what came out of the reduction."""
        return 1.0 if self.scaled is Scaled.SENT else self.scale


@dataclass(frozen=True)
class Reduction:
    """The part of `group` in a launch; one for each of a group's launches with the same buffers."""

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
    # Whether `segments` lie in a slot, which may be registered with NCCL.
    in_slot: bool = False

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        """Output and input of a reduce-scatter."""
        return list(zip(self.outputs, self.segments, strict=True))

    @functools.cached_property
    def _copy_to_main(self) -> Callable[[Sequence[torch.Tensor]], None]:
        return copies_to(self.group.grad_segments)

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """The outputs of a reduce-scatter."""
        if self.reduce.writes_main and not self.adds:
            return self.group.grad_segments
        return self.results

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
        scale_each(self.segments, self.reduce.factor(Scaled.SENT))

    def finish(self) -> None:
        """After the reduction: scales what came out and puts it into the main gradients, or adds it
        to what they hold."""
        reduce = self.reduce
        if reduce.way.into_shards:
            return
        group = self.group
        if group.reduced_hook is not None and group.domain.outer is None:
            scale_each(self.outputs, reduce.after)
            self.run_hook()
            reduce = replace(reduce, scale=1.0)
        if self.adds:
            for main, result in zip(group.grad_segments, self.results, strict=True):
                main.add_(result, alpha=reduce.after)
            return
        scale_each(self.outputs, reduce.factor(Scaled.RESULT))
        if not reduce.writes_main:
            self._copy_to_main(self.results)
        scale_each(group.grad_segments, reduce.factor(Scaled.MAIN))

    def run_hook(self) -> None:
        """Gives what came out to the group's hook."""
        for output in self.outputs:
            self.group.reduced_hook(output)  # type: ignore[misc]


def scale_each(tensors: Sequence[torch.Tensor], scale: float) -> None:
    """One kernel each: see `copies_to`."""
    if scale != 1.0:
        for tensor in tensors:
            tensor.mul_(scale)
