"""Makes the planes and scales of Transformer Engine's quantized tensors from main weights: a few
launches for all weights, to the bits that TE's own functions give.

TE has a function for the same (`quantize_master_weights`). It takes weights one by one, keeps a
bf16 copy of all main weights meanwhile and makes transposes of every shard, which are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8

from .e4m3 import BlockCast, MxCast, OwnRows, TensorCast, write_scales
from .weights import QuantizedWeight, Quantizer, Quantizers

Settings = tuple[str, bool, float, torch.dtype]
"""Format, powers of two, least amax, nominal dtype of the weight."""


def make_quantizers(weights: Sequence[QuantizedWeight]) -> Quantizers:
    """One for each format, and the settings of TE's quantizers."""
    parts: dict[Settings, list[QuantizedWeight]] = {}
    for weight in weights:
        parts.setdefault(_settings(weight), []).append(weight)
    return [(_quantizer_of(own, settings), own) for settings, own in parts.items()]


def _settings(weight: QuantizedWeight) -> Settings:
    quantizer: Any = weight.param._quantizer  # type: ignore[attr-defined]
    powers = bool(getattr(quantizer, "force_pow_2_scales", False))
    epsilon = float(getattr(quantizer, "amax_epsilon", 0.0))
    return weight.format.name, powers, epsilon, weight.param.dtype


def _quantizer_of(weights: Sequence[QuantizedWeight], settings: Settings) -> Quantizer:
    if settings[0] != MXFP8.name:
        return Scaled(weights, settings)
    names = ("rowwise", "columnwise", "rowwise_scales", "columnwise_scales")
    return MxCast(_rows(weights, names), settings[-1])


def _rows(
    weights: Sequence[QuantizedWeight], names: Sequence[str] = ("rowwise",)
) -> list[OwnRows]:
    """Rows as a cast wants them, with the planes of these names."""
    return [
        OwnRows(
            tuple(weight.param.shape), weight.start, weight.main.view(-1),
            tuple(weight.planes[name].view(-1) for name in names),
        )
        for weight in weights
    ]  # fmt: skip


def _apart(count: int, device: torch.device) -> torch.Tensor:
    """(count,) float32 ones, of which each is where a GEMM can read its scale: cuBLAS
    refuses a scale that does not begin at a multiple of 16 bytes. The scales of blocks do: a weight
    has a multiple of 4."""
    return torch.ones(count, 16 // torch.float32.itemsize, device=device)[:, 0]


class Scaled:
    """Quantizes with scales that are beside the planes, on every rank, from the amaxes of these
    main weights: of a weight, or of each of its blocks. What planes are multiplied by, of each
    weight in its place, becomes a field of the parameters."""

    def __init__(self, weights: Sequence[QuantizedWeight], settings: Settings) -> None:
        name, self._powers, self._epsilon, rounded = settings
        rows, device = _rows(weights), weights[0].main.device
        cast: TensorCast | BlockCast = TensorCast(rows, rounded)
        field = "_scale_inv"
        if name == BLOCK128.name:
            cast = BlockCast(rows, rounded, self._powers, self._epsilon)
            field = "_rowwise_scale_inv"
        self._weights, self.amax_numel = tuple(weights), cast.amax_numel
        self._scales = torch.ones(self.amax_numel, device=device)
        self._found = torch.ones(self.amax_numel, device=device)
        self._inverses = self._found
        if name != BLOCK128.name:
            self._inverses = _apart(self.amax_numel, device)
        kept = [index for index, weight in enumerate(weights) if weight.kept]
        others = set(range(len(weights))).difference(kept)
        self._kept, self._others = cast.only(kept, False), cast.only(others, True)
        for weight, view in zip(weights, cast.views(self._inverses), strict=True):
            view.copy_(getattr(weight.param, field).view(view.shape))
            setattr(weight.param, field, view)

    def bind(self, amaxes: torch.Tensor) -> None:
        self._amaxes = amaxes

    def begin(self) -> None:
        self._amaxes.zero_()
        self._kept.begin(self._amaxes)
        self._others.begin(self._amaxes)

    def finish(self) -> None:
        write_scales(self._amaxes, self._scales, self._found, self._powers, self._epsilon)
        if self._inverses is not self._found:
            self._inverses.copy_(self._found)
        self._kept.finish(self._scales)

    def writer(self, weights: Sequence[QuantizedWeight]) -> Callable[[], None]:
        numbers = {id(weight.param): index for index, weight in enumerate(self._weights)}
        places = [numbers[id(weight.param)] for weight in weights]
        rows = dict(zip(places, _rows(weights), strict=True))
        return partial(self._others.only(places, True, rows).finish, self._scales)
