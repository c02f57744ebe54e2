"""How main weights become the planes and scales of Transformer Engine's quantized tensors: a few
launches for all weights, to the bits that TE's own functions give.

TE has a function for the same (`quantize_master_weights`). It takes weights one by one, keeps a
bf16 copy of all main weights meanwhile and makes transposes of every shard, which are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8, PER_TENSOR, WeightFormat

from .e4m3 import (
    BlockCast,
    Kind,
    MxCast,
    MxRows,
    OwnRows,
    TensorCast,
    write_scales,
)
from .scaling import LAST, NEXT, AfterLoad
from .weights import QuantizedWeight, Quantizer

Rows = TypeVar("Rows", bound=OwnRows)

Settings = tuple[str, bool, float, torch.dtype]
"""Class of the quantizer, powers of two, least amax, nominal dtype of the weight."""


def make_quantizer(format: WeightFormat, weights: Sequence[QuantizedWeight]) -> Quantizer:
    """Of weights of one format: one for each kind of TE's quantizers, and their settings."""
    parts: dict[Settings, list[QuantizedWeight]] = {}
    for weight in weights:
        parts.setdefault(_settings(weight), []).append(weight)
    made = [_MAKERS[format.name](each, settings) for settings, each in parts.items()]
    return made[0] if len(made) == 1 else Together(made, list(parts.values()))


def _settings(weight: QuantizedWeight) -> Settings:
    quantizer = _quantizer(weight)
    powers = bool(getattr(quantizer, "force_pow_2_scales", False))
    epsilon = float(getattr(quantizer, "amax_epsilon", 0.0))
    return type(quantizer).__name__, powers, epsilon, weight.param.dtype


def _quantizer(weight: QuantizedWeight) -> Any:
    """The one that the parameter has now: TE may put another one there."""
    return weight.param._quantizer  # type: ignore[attr-defined]


def _rows(
    weights: Sequence[QuantizedWeight], made: type[Rows], names: Sequence[str] = ("rowwise",)
) -> list[Rows]:
    """As a cast wants them, with the planes of these names."""
    return [
        made(
            tuple(weight.param.shape), weight.start, weight.main.view(-1),
            *(weight.planes[name].view(-1) for name in names),
        )
        for weight in weights
    ]  # fmt: skip


def _split(cast: Kind, weights: Sequence[QuantizedWeight]) -> tuple[Kind, Kind]:
    """Of the weights whose planes are kept, and of the others."""
    kept = [index for index, weight in enumerate(weights) if weight.kept]
    return cast.only(kept, False), cast.only(set(range(len(weights))).difference(kept), True)


def _part(
    cast: Kind, weights: Sequence[QuantizedWeight], chosen: Sequence[QuantizedWeight],
    rows: Sequence[OwnRows],
) -> Kind:
    """Of the parameters of `chosen`, of which `rows` have the planes."""
    numbers = {id(weight.param): index for index, weight in enumerate(weights)}
    places = [numbers[id(weight.param)] for weight in chosen]
    return cast.only(places, True, dict(zip(places, rows, strict=True)))


def _take_scales(weights: Sequence[QuantizedWeight], field: str, views: list[torch.Tensor]) -> None:
    """Makes `views` the scales of the weights, with the values that they have."""
    for weight, view in zip(weights, views, strict=True):
        view.copy_(getattr(weight.param, field).view(view.shape))
        setattr(weight.param, field, view)


def _apart(count: int, device: torch.device) -> torch.Tensor:
    """(count,) float32 ones, of which each is where a matrix product can read its scale: cuBLAS
    refuses a scale that does not begin at a multiple of 16 bytes. The scales of blocks do: a weight
    has a multiple of 4."""
    return torch.ones(count, 16 // torch.float32.itemsize, device=device)[:, 0]


class Together:
    """Several quantizers as one, with the weights of each."""

    def __init__(
        self, parts: Sequence[Quantizer], weights: Sequence[Sequence[QuantizedWeight]]
    ) -> None:
        self._parts, self._weights = parts, weights
        self.amax_numel = sum(part.amax_numel for part in parts)

    def bind(self, amaxes: torch.Tensor) -> None:
        counts = [part.amax_numel for part in self._parts]
        for part, own in zip(self._parts, amaxes.split(counts), strict=True):
            if part.amax_numel:
                part.bind(own)

    def begin(self) -> None:
        for part in self._parts:
            part.begin()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def writer(self, weights: Sequence[QuantizedWeight]) -> Callable[[], None]:
        writers = []
        for part, own in zip(self._parts, self._weights, strict=True):
            params = {id(weight.param) for weight in own}
            found = [weight for weight in weights if id(weight.param) in params]
            writers += [part.writer(found)] if found else []

        def write() -> None:
            for each in writers:
                each()

        return write


class Current:
    """Scales from the amaxes of these main weights: of a weight, or of each of its blocks."""

    def __init__(
        self, weights: Sequence[QuantizedWeight], settings: Settings, blocks: bool
    ) -> None:
        _, self._powers, self._epsilon, rounded = settings
        self._weights, rows = tuple(weights), _rows(weights, OwnRows)
        cast = (
            BlockCast(rows, rounded, self._powers, self._epsilon) if blocks
            else TensorCast(rows, rounded)
        )  # fmt: skip
        self._kept, self._others = _split(cast, weights)
        self.amax_numel = cast.amax_numel
        device = weights[0].main.device
        self._scales, self._inverses = torch.ones(2, self.amax_numel, device=device).unbind()
        self._read = self._inverses if blocks else _apart(self.amax_numel, device)
        field = "_rowwise_scale_inv" if blocks else "_scale_inv"
        _take_scales(weights, field, cast.views(self._read))

    def bind(self, amaxes: torch.Tensor) -> None:
        self._amaxes = amaxes

    def begin(self) -> None:
        self._amaxes.zero_()
        self._kept.begin(self._amaxes)
        self._others.begin(self._amaxes)

    def finish(self) -> None:
        write_scales(self._amaxes, self._scales, self._inverses, self._powers, self._epsilon)
        if self._read is not self._inverses:
            self._read.copy_(self._inverses)
        self._kept.finish(self._scales)

    def writer(self, weights: Sequence[QuantizedWeight]) -> Callable[[], None]:
        rows = _rows(weights, OwnRows)
        return partial(_part(self._others, self._weights, weights, rows).finish, self._scales)


class Delayed:
    """Scales that TE has made of the amaxes of earlier steps; those of this one go to where it
    looks for them. What has been seen since TE looked last is in the amaxes already. After a load
    bytes are made with the scale that the saved ones had, or, where it is unknown, with one of
    these main weights, which then is TE's too."""

    def __init__(self, weights: Sequence[QuantizedWeight], settings: Settings) -> None:
        self._weights = tuple(weights)
        self._cast = TensorCast(_rows(weights, OwnRows), settings[3])
        self._kept, self._others = _split(self._cast, weights)
        self.amax_numel = len(weights)
        device = weights[0].main.device
        self._scales = torch.ones(len(weights), device=device)
        self._inverses = _apart(len(weights), device)
        _take_scales(weights, "_scale_inv", self._cast.views(self._inverses))
        self._begin_scales()

    def _begin_scales(self) -> None:
        """Those of the bytes that are there: the quantizer's, unless it has moved on since."""
        torch.reciprocal(self._inverses, out=self._scales)
        for weight, scale in zip(self._weights, self._cast.views(self._scales), strict=True):
            own, inverse = _quantizer(weight).scale.view(1), weight.param.__dict__["_scale_inv"]
            scale.copy_(torch.where(own.reciprocal() == inverse, own, scale))
            weight.param.__dict__[LAST] = scale

    def bind(self, amaxes: torch.Tensor) -> None:
        self._amaxes = amaxes

    def begin(self) -> None:
        self._quantizers = [_quantizer(weight) for weight in self._weights]
        self._loaded: list[AfterLoad | None] = [
            weight.param.__dict__.pop(NEXT, None) for weight in self._weights
        ]
        views = self._cast.views(self._scales)
        scales = [
            quantizer.scale.view(1) if loaded is None or loaded.scale is None else loaded.scale
            for quantizer, loaded in zip(self._quantizers, self._loaded, strict=True)
        ]
        torch._foreach_copy_(views, scales)
        self._slots = [quantizer.amax.view(1) for quantizer in self._quantizers]
        torch._foreach_copy_(self._cast.views(self._amaxes), self._slots)
        self._kept.finish(self._scales, self._amaxes)
        self._others.begin(self._amaxes)

    def finish(self) -> None:
        amaxes = self._cast.views(self._amaxes)
        if any(loaded is not None for loaded in self._loaded):
            self._follow_load(amaxes)
        torch._foreach_copy_(self._slots, amaxes)
        torch.reciprocal(self._scales, out=self._inverses)

    def writer(self, weights: Sequence[QuantizedWeight]) -> Callable[[], None]:
        rows = _rows(weights, OwnRows)
        return partial(_part(self._others, self._weights, weights, rows).finish, self._scales)

    def _follow_load(self, amaxes: list[torch.Tensor]) -> None:
        """Finds unknown scales, and makes all bytes once more; the others are the same.
        Where bytes are those of before, TE has seen their amax, or forgotten it by now."""
        fresh, unused = torch.empty(2, self.amax_numel, device=self._amaxes.device).unbind()
        write_scales(self._amaxes, fresh, unused)
        scales, found = self._cast.views(self._scales), self._cast.views(fresh)
        for index, loaded in enumerate(self._loaded):
            if loaded is not None and loaded.scale is None:
                scales[index].copy_(found[index] * 2.0**-loaded.margin)
                own = self._quantizers[index].scale
                own.copy_(scales[index].view_as(own))
            elif loaded is not None:
                before = self._slots[index]
                amaxes[index].copy_(torch.where(before > 0, amaxes[index], before))
        if any(loaded is not None and loaded.scale is None for loaded in self._loaded):
            self._kept.finish(self._scales)


class Mx:
    """Scales of 32 neighbors, which every rank has the whole of."""

    amax_numel = 0

    def __init__(self, weights: Sequence[QuantizedWeight], settings: Settings) -> None:
        names = ("rowwise", "columnwise", "rowwise_scales", "columnwise_scales")
        self._cast = MxCast(_rows(weights, MxRows, names), settings[3])

    def bind(self, amaxes: torch.Tensor) -> None:
        raise AssertionError("MXFP8 has no amaxes to agree upon")

    def begin(self) -> None:
        """Nothing is to be agreed upon."""

    def finish(self) -> None:
        self._cast.cast()

    def writer(self, weights: Sequence[QuantizedWeight]) -> Callable[[], None]:
        raise AssertionError("MXFP8 planes are kept")


def _per_tensor(weights: Sequence[QuantizedWeight], settings: Settings) -> Quantizer:
    delayed = settings[0] == "Float8Quantizer"
    return Delayed(weights, settings) if delayed else Current(weights, settings, blocks=False)


_MAKERS: dict[str, Callable[[Sequence[QuantizedWeight], Settings], Quantizer]] = {
    PER_TENSOR.name: _per_tensor,
    BLOCK128.name: lambda weights, settings: Current(weights, settings, blocks=True),
    MXFP8.name: Mx,
}
