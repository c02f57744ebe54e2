"""Quantizes weights from main weights: once after each change of those.

    compute stream   step | begin  maxima over ranks  finish | forward ...
    gather stream                                            casts, gathers of bytes

Where the bytes are kept, they are written then, too. Where they are not, each gather casts this
rank's main weights with the scales of that time, as it does for compute weights in another dtype.
Scales made at each gather were rejected: they would cost a reduction for each unit, and delayed
scaling, whose scales depend on what was seen so far, would not have those of the step.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from ..core.comm.communicator import Communicator
from ..core.engine.buffer import copy_each
from ..core.engine.gather import GatherPipeline
from ..core.engine.group import ParamGroup, by_domain
from ..core.engine.launches import AGREED
from ..core.engine.quantized import QuantizedWeights
from ..core.layout.format import WeightFormat
from ..core.runtime.device import COMPUTE, GATHER

Views = Mapping[str, torch.Tensor]
"""Tensors of a parameter by plane."""

PlaneItems = Mapping[str, Sequence[torch.Tensor]]
"""Plane -> this rank's rows of each parameter of a group."""


@dataclass(frozen=True)
class QuantizedWeight:
    """One weight as a quantizer sees it: this rank's rows of it. Shapes are those of rows of the
    weight, of shape (M, K); a rank may have none of them."""

    # Its fields are not to be read: they may be guarded or old.
    param: nn.Parameter
    # The parameter's first name.
    name: str
    # That of its group.
    format: WeightFormat
    # Where this rank's rows begin in the flat weight, in elements; a multiple of K times the
    # format's granule of rows. 0 if there are none.
    start: int
    # (rows, K), the main weights, in the main dtype: float32, unless chosen otherwise, and
    # `param`'s own for frozen parameters.
    main: torch.Tensor
    # Whether the planes are there between gathers.
    kept: bool
    # By name, the same rows of each plane, to be written: (rows / r, K / c) where one element
    # stands for r x c of the weight. Every rank that holds rows of the weight writes all planes of
    # these rows, and no others.
    planes: Views


class Quantizer(Protocol):
    """Makes planes and scales of weights of one kind from their main weights, in two phases.

    All ranks of a domain have one over the same weights in the same order, and call it together,
    also those that hold no rows. Everything is enqueued on the current stream; the host waits for
    nothing. Between the phases the largest of each maximum is taken over all ranks that hold rows
    of the weights. Main weights are rounded to the parameter's own dtype first, as a kernel that
    reads compute weights would see them.
    """

    amax_numel: int
    """Number of maxima to agree upon; 0 if every scale is a matter of one rank's rows."""

    def bind(self, amaxes: torch.Tensor) -> None:
        """Gives the quantizer its maxima for good: float32 of shape (amax_numel,), a part of the
        vector that is reduced. Called once, before anything else, if `amax_numel` is not 0."""

    def begin(self) -> None:
        """Fills all of `amaxes` from this rank's rows; 0 where it has none."""

    def finish(self) -> None:
        """Sets scales from `amaxes`, and writes this rank's rows of the planes that are kept.
        Scales that are not in planes are set for the whole of every weight, on every rank."""

    def writer(self, weights: Sequence[QuantizedWeight]) -> Callable[[], None]:
        """A function that writes this rank's rows of the planes of `weights`, on the current
        stream. It reads the main weights of that time, and the scales that `finish` set last.

        weights: of one group, whose planes are not kept. Their planes may be others than those that
        this quantizer was made with, and must be there when the function is called. Called after
        `bind`."""


Quantizers = Sequence[tuple[Quantizer, Sequence[QuantizedWeight]]]
"""Quantizers, each with its weights."""

AmaxReduction = tuple[Sequence[ParamGroup], torch.Tensor, Communicator]
"""The first group of a domain, its maxima, and an axis that they are reduced over."""


class QuantizedParams(QuantizedWeights):
    """The engine's `QuantizedWeights`, of one library's parameters, which a subclass knows. They
    are quantized again, lazily, after their main weights have changed."""

    # Whether changed weights are quantized at once.
    _at_once = False
    # Whether main weights may be written without a notification.
    _unnotified = False
    # Whether main weights have changed since they were quantized.
    _changed = False
    # Whether those of frozen parameters have, too.
    _loaded = False

    # Of a subclass.

    @abc.abstractmethod
    def fields(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        """The tensor of every plane, by name, in the plane's shape and dtype, as they are now."""

    @abc.abstractmethod
    def scales(self, param: nn.Parameter) -> list[torch.Tensor]:
        """Tensors beside the planes that every rank has, as they are now; broadcast in place at
        construction. The scale that the planes are multiplied by comes first, if it is no plane.
        `param` may be guarded."""

    @abc.abstractmethod
    def high_precision(self, param: nn.Parameter) -> torch.Tensor | None:
        """The value that `param` was quantized from, on any device, in the weight's shape. Taken
        away from the parameter. None if it was not preserved: main weights then begin as what the
        planes stand for, `param.dequantize()`."""

    @abc.abstractmethod
    def point(self, param: nn.Parameter, views: Views) -> None:
        """Makes `views` the fields of `param` for life, one for each plane. They have the values
        that `fields` gave. Drops what is derived from fields."""

    @abc.abstractmethod
    def quantizers(self, weights: Sequence[QuantizedWeight]) -> Quantizers:
        """The quantizers of all weights of one domain, each with its own, in an order that is the
        same on all ranks. Called once, after all units are built."""

    # Construction.

    def share(self, param: nn.Parameter, broadcast: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Returns the value that `param` was made from, or, if that was not preserved, what it
        stands for. The bytes are not quantized again: they may have been made from rounded values,
        which would give other bytes."""
        fields = list(self.fields(param).values())
        for tensor in (*fields, *self.scales(param)):
            broadcast(tensor)
        value = self.high_precision(param)
        if value is None:
            value = param.dequantize()
        value = value.detach().to(fields[0].device)
        broadcast(value)
        return value

    def move(self, param: nn.Parameter, views: Views) -> None:
        fields = self.fields(param)
        copy_each(list(views.values()), [fields[name] for name in views])
        self.point(param, views)

    def made(self, groups: Sequence[ParamGroup], gather: GatherPipeline) -> QuantizedWeights | None:
        # Not the gather itself: its units have this object, and a cycle would keep their memory.
        self._engine_runtime = gather.runtime
        self._log = gather.log
        quantized = [group for group in groups if group.key.quantized]
        trained = [group for group in quantized if group.key.requires_grad]
        frozen = [group for group in quantized if not group.key.requires_grad]
        # Quantizers and reductions of weights that an optimizer updates, and of the others.
        self._trained = self._plan(trained, gather)
        self._frozen = self._plan(frozen, gather)
        # Bytes that are not kept are gone since their unit was built, and so is what made them:
        # scales must be computed again before a gather can cast.
        self._changed = any(group.weights.write_planes for group in trained)
        return self if quantized else None

    def _plan(
        self, groups: Sequence[ParamGroup], gather: GatherPipeline
    ) -> tuple[list[Quantizer], list[AmaxReduction]]:
        """The quantizers of `groups`, and the reductions of their maxima. These use communicators
        of gathers, whose work the compute stream is behind by then; those of gradients' reductions
        may be in use."""
        quantizers: list[Quantizer] = []
        reductions: list[AmaxReduction] = []
        for domain, members in by_domain(groups).items():
            made, amaxes = self._quantizers(members)
            quantizers += made
            if not amaxes.numel():
                continue
            first = members[:1]
            if members[0].shards.splits_axis:
                reductions.append((first, amaxes, gather.communicators[domain]))
            if members[0].shards.splits_outer:
                reductions.append((first, amaxes, gather.outer[domain]))
        return quantizers, reductions

    def _quantizers(self, groups: Sequence[ParamGroup]) -> tuple[list[Quantizer], torch.Tensor]:
        """The quantizers, and the maxima of all of them."""
        weights = [weight for group in groups for weight in rows_of(group)]
        made = self.quantizers(weights)
        counts = [quantizer.amax_numel for quantizer, _ in made]
        amaxes = torch.zeros(sum(counts), dtype=torch.float32, device=self._engine_runtime.device)
        for (quantizer, _), part in zip(made, amaxes.split(counts), strict=True):
            if part.numel():
                quantizer.bind(part)
        for group in groups:
            if not group.weights.keeps_own:
                _cast_at_gathers(group, made)
        return [quantizer for quantizer, _ in made], amaxes

    # Main weights change.

    def expect_writes(self) -> None:
        self._unnotified = True

    def quantize_at_once(self) -> None:
        self._at_once = True

    def changed(self, loaded: bool, needed: bool) -> None:
        self._changed = True
        self._loaded |= loaded
        if needed or self._at_once:
            self.catch_up()

    def is_pending(self, trained: bool) -> bool:
        if not trained:
            return self._loaded
        return self._changed or self._unnotified

    @torch.no_grad()
    def catch_up(self) -> None:
        quantizers: list[Quantizer] = []
        reductions: list[AmaxReduction] = []
        for trained, plan in ((True, self._trained), (False, self._frozen)):
            if self.is_pending(trained):
                plan_quantizers, plan_reductions = plan
                quantizers += plan_quantizers
                reductions += plan_reductions
        self._changed = False
        self._loaded = False
        if not quantizers:
            return
        runtime = self._engine_runtime
        runtime.wait(COMPUTE, runtime.record(GATHER))
        begin = [quantizer.begin for quantizer in quantizers]
        reduce = [partial(self._reduce, *reduction) for reduction in reductions]
        finish = [quantizer.finish for quantizer in quantizers]
        runtime.submit(COMPUTE, *begin, *reduce, *finish)

    def _reduce(
        self, groups: Sequence[ParamGroup], amaxes: torch.Tensor, axis: Communicator
    ) -> list[object]:
        self._log.note(AGREED, groups, axis)
        return axis.all_reduce_max(amaxes)


def rows_of(group: ParamGroup, into: PlaneItems | None = None) -> list[QuantizedWeight]:
    """This rank's rows of each parameter of a quantized group.

    into: the planes to be written; those of the group if none are given."""
    held = group.shards.held
    if not into:
        into = {shard.plane.name: shard.items(held) for shard in group.weights.sharded}
    mains = group.main.buffer.items(held)
    found = []
    for index, entry in enumerate(group.managed):
        weight = QuantizedWeight(
            param=entry.param,
            name=entry.fqns[0],
            format=group.key.format,
            start=held.range(index).start,
            main=mains[index],
            kept=group.weights.keeps_own,
            planes={name: items[index] for name, items in into.items()},
        )
        found.append(weight)
    return found


def _cast_at_gathers(group: ParamGroup, quantizers: Quantizers) -> None:
    """Makes gathers of a group cast its planes, which are not kept (`cast_planes_by`)."""
    quantizer_of = {id(weight.param): made for made, weights in quantizers for weight in weights}

    def writers(weights: Sequence[QuantizedWeight]) -> list[Callable[[], None]]:
        parts: dict[Quantizer, list[QuantizedWeight]] = {}
        for weight in weights:
            parts.setdefault(quantizer_of[id(weight.param)], []).append(weight)
        return [quantizer.writer(part) for quantizer, part in parts.items()]

    own_writers = writers(rows_of(group))
    ref = weakref.ref(group)  # as the group will have `write`, and must not keep itself alive

    def write(into: PlaneItems | None = None) -> None:
        alive = ref()
        if alive is None:
            return
        for write_part in writers(rows_of(alive, into)) if into else own_writers:
            write_part()

    group.weights.cast_planes_by(write)
