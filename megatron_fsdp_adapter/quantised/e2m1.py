"""Casts to NVFP4, of the rows that this rank holds of many weights: E2M1, two in a byte, the first
in the low half, with an E4M3 scale for each 16 x 16 elements and one amax for the whole weight.

As in `e4m3`, a pass over all weights is one launch on CUDA, and torch does the same to the same
bits elsewhere. The arithmetic is Transformer Engine's for main weights, operation by operation:

    encode  = min(448 * 6 / amax of the weight, LARGEST), 1 where that amax is 0
    scale   = E4M3 of min(amax of the tile * (encode * (1 / 6)), LARGEST)
    factor  = min(1 / (scale * (1 / encode)), LARGEST), LARGEST where the scale is 0
    element = E2M1 of element * factor, to nearest even, saturating

An element is rounded to the weight's nominal dtype first, NaN does not count for an amax and
becomes +6, and zeros keep their sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch

from .e4m3 import Cast, OwnRows, check_planes, e4m3_of, round_to, sizes_of
from .tables import BAND, FULL, LARGEST, SIXTH, TILE, TINY

HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between an E2M1 number and the next; what lies on one goes to the even one of the two: down from
the first, up from the second, and so on in turn."""


@dataclass(frozen=True)
class TileRows(OwnRows):
    """With a scale for every 16 x 16 elements; all tiles of a shard, nothing of other ranks'.

    bytes: (n / 2,) uint8; scales: (n / 16,) uint8, of (rows, k / 16): each row of a tile has its
    scale. ValueError unless rows and k are multiples of 16.
    """

    per_byte: ClassVar[int] = 2

    scales: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows.start % TILE or len(self.rows) % TILE or self.shape[1] % TILE:
            raise ValueError(
                f"rows {self.rows.start} to {self.rows.stop} of {self.shape}: NVFP4 needs rows and "
                f"columns in multiples of {TILE}"
            )
        check_planes([self.scales], [self.numel // TILE])

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.main, self.bytes, self.scales


class TileCast(Cast):
    """amaxes: (weights,) float32. Two passes, with the maxima over ranks between them."""

    def __init__(self, rows: Sequence[TileRows], rounded: torch.dtype) -> None:
        super().__init__(rows, rounded)
        self.amax_numel = len(self.rows)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each weight's part of flat amaxes, (1,)."""
        return list(flat.split(1))

    def _numbers(self, index: int) -> tuple[list[int], int]:
        own, rows = self.rows[index], self.rows[index].rows
        return [index, own.shape[1]], len(rows) // TILE * -(-own.shape[1] // BAND)

    def _fp4_kernels(self) -> ModuleType | None:
        """Where the kernels for E4M3 run, these do."""
        if self._kernels() is None:
            return None
        from . import triton_e2m1 as kernels

        return kernels

    def begin(self, amaxes: torch.Tensor) -> None:
        """Raises each amax to that of this rank's rows."""
        kernels = self._fp4_kernels()
        if kernels is not None:
            kernels.amaxes(self.table(), amaxes)
            return
        for index in self.held:
            size = sizes_of(round_to(self.rows[index].main, self.rounded)).amax()
            torch.maximum(amaxes[index], size, out=amaxes[index])

    def finish(self, amaxes: torch.Tensor) -> None:
        """Writes all bytes and scales. amaxes: of all ranks."""
        kernels = self._fp4_kernels()
        if kernels is not None:
            kernels.tiles(self.table(), self.bases(), amaxes)
            return
        for index in self.held:
            own = self.rows[index]
            _, data, scales = own.tensors
            values = round_to(own.main, self.rounded).view(-1, TILE, own.shape[1] // TILE, TILE)
            found, factors = _scales(sizes_of(values).amax((1, 3)), amaxes[index])
            scales.view(-1, TILE, found.shape[1]).copy_(found[:, None])
            codes = _e2m1(values * factors[:, None, :, None]).view(-1, 2)
            data.copy_(codes[:, 0] | codes[:, 1] << 4)


def _scales(tiles: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of tiles, as bytes, and what their elements are multiplied by, of the amaxes of tiles
    and the amax of the weight."""
    encode = torch.full_like(whole, FULL).div_(whole.clamp_min(TINY)).clamp_max_(LARGEST)
    encode = torch.where(whole > 0, encode, 1.0)
    scales = (tiles * (encode * SIXTH)).nan_to_num_(nan=LARGEST).clamp_max_(LARGEST)
    found = e4m3_of(scales)
    decoded = found.view(torch.float8_e4m3fn).float()
    decode = torch.reciprocal(torch.where(encode > 0, encode, 1.0))
    factors = torch.reciprocal(decoded * decode).clamp_max_(LARGEST)
    return found, factors.masked_fill_(decoded <= 0, LARGEST)


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, uint8."""
    bounds = torch.tensor(HALFWAY, device=values.device)
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros_like(bounds[1::2]))
    codes = torch.bucketize(values.abs(), bounds, out_int32=True).to(torch.uint8)
    return codes | ((values.signbit() & ~values.isnan()).to(torch.uint8) << 3)
