"""Makes the planes and scales of Transformer Engine's quantized tensors from main weights: a few
launches for all weights, to the bits that TE's own functions give.

TE has a function for the same (`quantize_master_weights`). It takes weights one by one, keeps a
bf16 copy of all main weights meanwhile and makes transposes of every shard, which are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8

from .e4m3 import BlockCast, LocalRows, MxCast, TensorCast, write_scales
from .scaling import LAST, NEXT
from .weights import QuantizedWeight, Quantizer, Quantizers


class Settings(NamedTuple):
    """Settings that are the same for all weights that are quantized together."""

    # Name of the format.
    format: str
    # Name of the class of TE's quantizers.
    kind: str
    powers_of_two: bool
    # The least amax.
    epsilon: float
    # The nominal dtype of the weights.
    dtype: torch.dtype


def make_quantizers(weights: Sequence[QuantizedWeight]) -> Quantizers:
    """Quantizers, each with its weights: one for each format, kind of TE's quantizers, and set of
    their settings."""
    parts: dict[Settings, list[QuantizedWeight]] = {}
    for weight in weights:
        parts.setdefault(_settings(weight), []).append(weight)
    return [(_quantizer_for(own, settings), own) for settings, own in parts.items()]


def _settings(weight: QuantizedWeight) -> Settings:
    quantizer = _te_quantizer(weight)
    return Settings(
        format=weight.format.name,
        kind=type(quantizer).__name__,
        powers_of_two=bool(getattr(quantizer, "force_pow_2_scales", False)),
        epsilon=float(getattr(quantizer, "amax_epsilon", 0.0)),
        dtype=weight.param.dtype,
    )


def _quantizer_for(weights: Sequence[QuantizedWeight], settings: Settings) -> Quantizer:
    if settings.format == MXFP8.name:
        names = ("rowwise", "columnwise", "rowwise_scales", "columnwise_scales")
        return MxCast(_rows(weights, names), settings.dtype)
    if settings.kind == "Float8Quantizer":
        return Delayed(weights, settings)
    return Current(weights, settings)


def _te_quantizer(weight: QuantizedWeight) -> Any:
    """TE's quantizer that the parameter has now: TE may put another one there."""
    return weight.param._quantizer  # type: ignore[attr-defined]


def _rows(
    weights: Sequence[QuantizedWeight], names: Sequence[str] = ("rowwise",)
) -> list[LocalRows]:
    """Rows as a cast wants them, with the planes of these names."""
    found = []
    for weight in weights:
        planes = tuple(weight.planes[name].view(-1) for name in names)
        shape = tuple(weight.param.shape)
        found.append(LocalRows(shape, weight.start, weight.main.view(-1), planes))
    return found


def _aligned_ones(count: int, device: torch.device) -> torch.Tensor:
    """(count,) float32 ones, each at a multiple of 16 bytes: cuBLAS refuses a scale at another
    place. Scales of blocks need no such gaps, as a weight has a multiple of 4."""
    return torch.ones(count, 16 // torch.float32.itemsize, dtype=torch.float32, device=device)[:, 0]


class ScaledQuantizer:
    """Base of quantizers whose scales are beside the planes, on every rank.

    Args:
        cast: casts all weights.
        inverses: the inverse scales of all weights, by which their planes are multiplied. `field`
            of each parameter becomes the view of its own.
    """

    def __init__(
        self,
        weights: Sequence[QuantizedWeight],
        cast: TensorCast | BlockCast,
        inverses: torch.Tensor,
        field: str,
    ) -> None:
        self._weights = tuple(weights)
        self._cast = cast
        self._inverses = inverses
        self.amax_numel = cast.amax_numel
        # What main weights are multiplied by.
        self._scales = torch.ones(self.amax_numel, dtype=torch.float32, device=inverses.device)
        kept = [index for index, weight in enumerate(weights) if weight.kept]
        others = set(range(len(weights))).difference(kept)
        # The casts of weights whose planes are there between gathers, and of the others.
        self._kept = cast.only(kept, False)
        self._others = cast.only(others, True)
        for weight, view in zip(weights, cast.views(inverses), strict=True):
            before = getattr(weight.param, field)
            view.copy_(before.view(view.shape))
            setattr(weight.param, field, view)

    def bind(self, amaxes: torch.Tensor) -> None:
        self._amaxes = amaxes

    def writer(self, weights: Sequence[QuantizedWeight]) -> Callable[[], None]:
        numbers = {id(weight.param): index for index, weight in enumerate(self._weights)}
        places = [numbers[id(weight.param)] for weight in weights]
        rows = dict(zip(places, _rows(weights), strict=True))
        return partial(self._others.only(places, True, rows).finish, self._scales)


class Current(ScaledQuantizer):
    """Scales from the amaxes of these main weights: of a weight, or of each of its blocks."""

    def __init__(self, weights: Sequence[QuantizedWeight], settings: Settings) -> None:
        self._powers = settings.powers_of_two
        self._epsilon = settings.epsilon
        rows = _rows(weights)
        device = weights[0].main.device
        if settings.format == BLOCK128.name:
            blocks = BlockCast(rows, settings.dtype, self._powers, self._epsilon)
            # The inverses as `write_scales` makes them, without gaps.
            self._found = torch.ones(blocks.amax_numel, dtype=torch.float32, device=device)
            super().__init__(weights, blocks, self._found, "_rowwise_scale_inv")
        else:
            self._found = torch.ones(len(rows), dtype=torch.float32, device=device)
            cast = TensorCast(rows, settings.dtype)
            super().__init__(weights, cast, _aligned_ones(len(rows), device), "_scale_inv")

    def begin(self) -> None:
        self._amaxes.zero_()
        self._kept.begin(self._amaxes)
        self._others.begin(self._amaxes)

    def finish(self) -> None:
        write_scales(self._amaxes, self._scales, self._found, self._powers, self._epsilon)
        if self._inverses is not self._found:
            self._inverses.copy_(self._found)
        self._kept.finish(self._scales)


class Delayed(ScaledQuantizer):
    """Scales that TE has made of the amaxes of earlier steps. The amaxes of this step go to where
    TE looks for them, together with what is there since it looked last.

    After a load bytes are made with the scale that the saved ones had. Where that is unknown, the
    scale is made of these main weights, and TE's quantizer gets it too."""

    _kept: TensorCast

    def __init__(self, weights: Sequence[QuantizedWeight], settings: Settings) -> None:
        cast = TensorCast(_rows(weights), settings.dtype)
        inverses = _aligned_ones(len(weights), weights[0].main.device)
        super().__init__(weights, cast, inverses, "_scale_inv")
        self._begin_scales()

    def _begin_scales(self) -> None:
        """Begins with the scales of the bytes that are there: the quantizer's scale, unless TE has
        changed that since."""
        torch.reciprocal(self._inverses, out=self._scales)
        for weight, scale in zip(self._weights, self._cast.views(self._scales), strict=True):
            own = _te_quantizer(weight).scale.view(1)
            fields = weight.param.__dict__
            is_of_bytes = own.reciprocal() == fields["_scale_inv"]
            scale.copy_(torch.where(is_of_bytes, own, scale))
            fields[LAST] = scale

    def begin(self) -> None:
        # TE's quantizers that the weights have now.
        self._quantizers: list[Any] = []
        # How a load wants each weight's bytes made (`scaling.NEXT`); None without a load.
        self._loaded: list[torch.Tensor | int | None] = []
        # Where TE looks for the amaxes.
        self._slots: list[torch.Tensor] = []
        scales = []
        for weight in self._weights:
            quantizer = _te_quantizer(weight)
            loaded = weight.param.__dict__.pop(NEXT, None)
            is_known = isinstance(loaded, torch.Tensor)
            scales.append(loaded if is_known else quantizer.scale.view(1))
            self._quantizers.append(quantizer)
            self._loaded.append(loaded)
            self._slots.append(quantizer.amax.view(1))
        torch._foreach_copy_(self._cast.views(self._scales), scales)
        torch._foreach_copy_(self._cast.views(self._amaxes), self._slots)
        self._kept.finish(self._scales, self._amaxes)
        self._others.begin(self._amaxes)

    def finish(self) -> None:
        amaxes = self._cast.views(self._amaxes)
        if any(loaded is not None for loaded in self._loaded):
            self._follow_load(amaxes)
        torch._foreach_copy_(self._slots, amaxes)
        torch.reciprocal(self._scales, out=self._inverses)

    def _follow_load(self, amaxes: list[torch.Tensor]) -> None:
        """Sets what a load has left open: scales that are unknown are made of the amaxes, and all
        bytes are made once more, the same ones where scales were known. TE has seen the amax of
        bytes with a known scale, or forgotten it by now: where nothing was noted since, neither is
        that."""
        fresh, unused = torch.empty(
            2, self.amax_numel, dtype=torch.float32, device=self._amaxes.device
        ).unbind()
        write_scales(self._amaxes, fresh, unused)
        scales = self._cast.views(self._scales)
        found = self._cast.views(fresh)
        for index, loaded in enumerate(self._loaded):
            if isinstance(loaded, int):
                scales[index].copy_(found[index] * 2.0**-loaded)
                own = self._quantizers[index].scale
                own.copy_(scales[index].view_as(own))
            elif loaded is not None:
                before = self._slots[index]
                amaxes[index].copy_(torch.where(before > 0, amaxes[index], before))
        if any(isinstance(loaded, int) for loaded in self._loaded):
            self._kept.finish(self._scales)
