"""The kernels of `e2m1`, as those of `triton_e4m3`. They have no instruction that only a newer GPU
has: E2M1 is made by comparisons, since main weights are read at the speed of memory anyway."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tables import BAND, FULL, HINT, LARGEST, MAX, SIXTH, TILE, TINY, Table
from .triton_e4m3 import DTYPES, e4m3, size_of


@triton.jit
def _e2m1(x):
    """As `e2m1.HALFWAY` says."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x == x, code | sign, 7)


@triton.jit
def _factors(
    tiles, whole, FULL: tl.constexpr, SIXTH: tl.constexpr, TINY: tl.constexpr,
    LARGEST: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """Scales of tiles, as bytes, and what their elements are multiplied by."""
    full = tl.zeros_like(whole) + FULL
    encode = tl.minimum(tl.div_rn(full, tl.maximum(whole, TINY)), LARGEST)
    encode = tl.where(whole > 0, encode, 1.0)
    scale = tiles * (encode * SIXTH)
    scale = tl.where(scale == scale, tl.minimum(scale, LARGEST), LARGEST)
    byte = e4m3(scale, MAX)
    decoded = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    decode = tl.div_rn(tl.zeros_like(whole) + 1.0, tl.where(encode > 0, encode, 1.0))
    held = tl.where(decoded > 0, decoded, 1.0)
    factor = tl.minimum(tl.div_rn(tl.zeros_like(held) + 1.0, held * decode), LARGEST)
    return byte, tl.where(decoded > 0, factor, LARGEST)


@triton.jit
def _tiles(
    lines, work, base, scales_base, amaxes,
    MAIN: tl.constexpr, ROUNDED: tl.constexpr, ALIGNED: tl.constexpr, CAST: tl.constexpr,
    TILE: tl.constexpr, BAND: tl.constexpr, FULL: tl.constexpr, SIXTH: tl.constexpr,
    TINY: tl.constexpr, LARGEST: tl.constexpr, MAX: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    line = lines + tl.load(work + 2 * program) * 5
    number = tl.load(work + 2 * program + 1)
    index = tl.load(line)
    columns = tl.load(line + 1)
    source = tl.load(line + 2).to(tl.pointer_type(MAIN))
    target = (base + tl.load(line + 3)).to(tl.pointer_type(tl.uint8))
    scales = (scales_base + tl.load(line + 4)).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        columns = tl.multiple_of(columns, HINT)
        source = tl.multiple_of(source, HINT)
        target = tl.multiple_of(target, HINT)
    across = tl.cdiv(columns, BAND)
    right = number % across
    row = (number // across * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = right * BAND + tl.arange(0, BAND)
    inside = (column < columns)[None, :] & (row >= 0)[:, None]
    offset = row[:, None] * columns + column[None, :]
    x = tl.load(source + offset, mask=inside, other=0.0).to(ROUNDED).to(tl.float32)
    size = size_of(x)
    if not CAST:
        tl.atomic_max(amaxes + index, tl.max(tl.max(size, 1), 0))
    else:
        EACH: tl.constexpr = BAND // TILE
        tiles = tl.max(tl.max(tl.reshape(size, (TILE, EACH, TILE)), 2), 0)
        byte, factor = _factors(tiles, tl.load(amaxes + index), FULL, SIXTH, TINY, LARGEST, MAX)

        part = right * EACH + tl.arange(0, EACH)
        tl.store(
            scales + row[:, None] * (columns // TILE) + part[None, :],
            tl.broadcast_to(byte[None, :], (TILE, EACH)),
            mask=(part < columns // TILE)[None, :] & (row >= 0)[:, None],
        )  # fmt: skip

        spread = tl.broadcast_to(factor[None, :, None], (TILE, EACH, TILE))
        code = _e2m1(x * tl.reshape(spread, (TILE, BAND)))
        low, high = tl.split(tl.reshape(code, (TILE, BAND // 2, 2)))
        pair = right * (BAND // 2) + tl.arange(0, BAND // 2)
        tl.store(
            target + row[:, None] * (columns // 2) + pair[None, :], (low | high << 4).to(tl.uint8),
            mask=(pair < columns // 2)[None, :] & (row >= 0)[:, None],
        )  # fmt: skip


def amaxes(table: Table, amaxes: torch.Tensor) -> None:
    """See `e2m1.TileCast.begin`."""
    _run(table, [0, 0], amaxes, False)


def tiles(table: Table, bases: list[int], amaxes: torch.Tensor) -> None:
    """See `e2m1.TileCast.finish`."""
    _run(table, bases, amaxes, True)


def _run(table: Table, bases: list[int], amaxes: torch.Tensor, cast: bool) -> None:
    _tiles[(len(table.work),)](
        table.lines, table.work, *bases, amaxes,
        DTYPES[table.main], DTYPES[table.rounded], table.aligned, cast,
        TILE, BAND, FULL, SIXTH, TINY, LARGEST, MAX, HINT, num_warps=4,
    )  # fmt: skip
