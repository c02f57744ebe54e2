"""The protocols of quantized weights: how a parameter object keeps its planes, and how they are
made from main weights.

A quantized parameter is a tensor whose nominal shape and dtype are those of the weight, and whose
values are in fields: one tensor for each plane of its `WeightFormat`, in the plane's shape, and
scales that every rank has. The engine points the fields at views of its flat buffers once, keeps
and gathers bytes, and has them quantized again after main weights have changed. It never looks
inside.

The order of calls:

    construction   `fields`, `scales`, `high_precision`, `point`; `guard_class` of each class
    a unit runs    `prepare` whenever the unit's module, or its backward, is about to run
    it has run     `drop_derived`
    new mains      `begin` of every quantizer, the largest of `amaxes` over ranks, `finish`
    a gather       the `writer` of each group that does not keep its shard of the planes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from megatron_fsdp_adapter.core.layout.format import WeightFormat


@dataclass(frozen=True)
class QuantizedWeight:
    """One weight as a quantizer sees it: this rank's rows of it. Shapes are those of rows of the
    weight, of shape (M, K); a rank may have none of them.

    Attributes:
        param: the parameter object. Its fields are not to be read: they may be guarded or old.
        name: its first name.
        format: that of its group.
        start: where this rank's rows begin in the flat weight, in elements; a multiple of K times
            the format's granule of rows. 0 if there are none.
        main: (rows, K), the main weights, in the main dtype: float32, unless chosen otherwise, and
            `param`'s own for frozen parameters.
        kept: whether the planes are there between gathers.
        planes: by name, the same rows of each plane, to be written: (rows / r, K / c) where one
            element stands for r x c of the weight. Every rank that holds rows of the weight writes
            all planes of these rows, and no others.
    """

    param: nn.Parameter
    name: str
    format: WeightFormat
    start: int
    main: torch.Tensor
    kept: bool
    planes: Mapping[str, torch.Tensor]


class Quantizer(Protocol):
    """Makes planes and scales of weights of one format from their main weights, in two phases.

    All ranks of a domain have one over the same weights in the same order, and call it together,
    also those that hold no rows. Everything is enqueued on the current stream; the host waits for
    nothing. Between the phases the engine takes the largest of each maximum over all ranks that
    hold rows of the weights. Main weights are rounded to the parameter's own dtype first, as a
    kernel that reads compute weights would see them.
    """

    amax_numel: int
    """How many maxima there are to agree upon; 0 if every scale is a matter of one rank's rows."""

    def bind(self, amaxes: torch.Tensor) -> None:
        """Where the maxima are for good: float32 of shape (amax_numel,), a part of the vector that
        is reduced. Called once, before anything else, only if there are any."""

    def begin(self) -> None:
        """Fills all of `amaxes` from this rank's rows; 0 where it has none."""

    def finish(self) -> None:
        """Sets scales from `amaxes`, and writes this rank's rows of the planes that are kept.
        Scales that are not in planes are set for the whole of every weight, on every rank."""

    def writer(self, weights: Sequence[QuantizedWeight]) -> Callable[[], None]:
        """What writes this rank's rows of the planes of `weights`, from main weights as they are,
        with the scales that `finish` has set last; enqueued on the current stream, when the planes
        are there. Asked for after `bind`, of parameters of one group that are not kept, whose
        planes may be others than those that this quantizer was made of."""


PlanesWriter = Callable[[Sequence[QuantizedWeight]], Callable[[], None]]
"""`Quantizer.writer`."""


class QuantizedParams(Protocol):
    """Knows one library's quantized parameters. `param` is always such a parameter object, and
    not guarded unless stated."""

    def fields(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        """The tensor of every plane, by name, in the plane's shape and dtype, as they are now."""

    def scales(self, param: nn.Parameter) -> list[torch.Tensor]:
        """What every rank has beside the planes, as they are now; broadcast in place at
        construction. The scale that the planes are multiplied by comes first, if it is no plane.
        `param` may be guarded."""

    def high_precision(self, param: nn.Parameter) -> torch.Tensor | None:
        """The value that `param` was quantized from, on any device, in the weight's shape. Taken
        away from the parameter. None if it was not preserved: main weights then begin as what the
        planes stand for, `param.dequantize()`."""

    def point(self, param: nn.Parameter, views: Mapping[str, torch.Tensor]) -> None:
        """Makes `views`, one for each plane, which hold what `fields` gave, the fields of `param`
        for life. Drops what is derived from fields."""

    def prepare(self, param: nn.Parameter) -> None:
        """The planes are there, and a pass reads them next. Nothing that only backward reads should
        be derived in a forward."""

    def drop_derived(self, param: nn.Parameter) -> None:
        """Forgets what was derived from planes (transposes): they change, or are given back.
        `param` may be guarded: fields can be assigned, not read."""

    def guard_class(self, original: type) -> type:
        """The class of a parameter of class `original` while its planes are not there: a subclass
        that refuses to read fields, by `guard.resharded_class`."""

    def quantizer(self, format: WeightFormat, weights: Sequence[QuantizedWeight]) -> Quantizer:
        """Of all weights of one domain and format, in an order that is the same on all ranks.
        Called once, after all units are built."""
