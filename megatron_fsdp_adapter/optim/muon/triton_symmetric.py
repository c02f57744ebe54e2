"""A symmetric product in Triton: the tiles on and below the diagonal, each written twice.

One program makes one tile of one matrix of the batch, so that a matrix's result does not depend on
the others. Additions are in float32. Pointers were as fast as descriptors (TMA) on an H200, and a
launch with them takes the host less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SIDE, DEPTH = 128, 64
"""Side of a tile, and depth of what is multiplied at once."""
WARPS, STAGES = 8, 3


@triton.jit
def _tile(number):
    """Row and column of a tile, by its number among those on and below the diagonal, row by row."""
    i = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)  # the root was rounded
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    return i, number - i * (i + 1) // 2


@triton.jit
def _product(
    x, y, added, out, n, k, alpha, beta, diagonal, ADDED: tl.constexpr, TALL: tl.constexpr,
    EVEN: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    i, j = _tile(tl.program_id(0))
    batch = tl.program_id(1).to(tl.int64)
    rows, columns = i * SIDE + tl.arange(0, SIDE), j * SIDE + tl.arange(0, SIDE)
    inner = tl.arange(0, DEPTH)
    if TALL:  # whole tiles alone: loads of the next matrix's elements would be added up
        left = x + batch * n * k + inner[:, None].to(tl.int64) * n + rows[None, :]
        right = y + batch * n * k + inner[:, None].to(tl.int64) * n + columns[None, :]
    else:
        here, there = (rows, columns) if EVEN else (rows % n, columns % n)
        left = x + batch * n * k + here[:, None].to(tl.int64) * k + inner[None, :]
        right = y + batch * n * k + there[:, None].to(tl.int64) * k + inner[None, :]
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, k, DEPTH):
        if TALL:
            total = tl.dot(tl.load(left).T, tl.load(right), total)
            left += DEPTH * n
            right += DEPTH * n
        else:
            if EVEN:
                total = tl.dot(tl.load(left), tl.load(right).T, total)
            else:
                more = inner[None, :] < k - start
                a = tl.load(left, mask=more, other=0.0)
                total = tl.dot(a, tl.load(right, mask=more, other=0.0).T, total)
            left += DEPTH
            right += DEPTH
    total *= alpha
    at = batch * n * n + rows[:, None].to(tl.int64) * n + columns[None, :]
    mirror = batch * n * n + columns[:, None].to(tl.int64) * n + rows[None, :]
    if EVEN and i > j:  # without masks loads and stores are of whole vectors
        if ADDED:
            total += beta * tl.load(added + at).to(tl.float32)
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + at, rounded)
        tl.store(out + mirror, rounded.T)
    else:
        inside = (rows[:, None] >= columns[None, :]) & (rows[:, None] < n)
        if ADDED:
            total += beta * tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + at, rounded, mask=inside)
        above = (rows[None, :] > columns[:, None]) & (rows[None, :] < n)
        tl.store(out + mirror, rounded.T, mask=above)


def tiles_of(n: int, side: int = SIDE) -> int:
    """Number of tiles of n rows on or below the diagonal."""
    count = -(-n // side)
    return count * (count + 1) // 2


def is_even(n: int, k: int, side: int = SIDE, depth: int = DEPTH) -> bool:
    """True if all tiles are whole."""
    return n % side == 0 and k % depth == 0


def symmetric_product(
    x: torch.Tensor, y: torch.Tensor, added: torch.Tensor | None, beta: float, alpha: float,
    diagonal: float, tall: bool, side: int = SIDE, depth: int = DEPTH,
) -> torch.Tensor:  # fmt: skip
    """alpha x y^T + beta added + diagonal, or with `tall` x^T y in the place of x y^T.

    x, y: (batch, n, k), or with `tall` (batch, k, n), which then has whole tiles (`is_even`); all
    contiguous.
    """
    batch, n, k = (x.shape[0], x.shape[2], x.shape[1]) if tall else x.shape
    out = torch.empty(batch, n, n, dtype=x.dtype, device=x.device)
    _product[(tiles_of(n, side), batch)](
        x, y, out if added is None else added, out, n, k, alpha, beta, diagonal,
        added is not None, tall, is_even(n, k, side, depth), side, depth,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
