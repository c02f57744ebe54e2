"""A symmetric product in Triton: the tiles on and below the diagonal, each written twice.

One program makes one tile of one matrix of the batch, so that a matrix's result does not depend on
the others. Additions are in float32. Pointers were as fast as descriptors (TMA) on an H200, and a
launch with them takes the host less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SIDE = 128
"""Side of a tile."""
DEPTH = 64
"""Depth of what is multiplied at once."""
WARPS = 8
STAGES = 3


@triton.jit
def _tiles_before(row):
    """Number of tiles in the rows of tiles before one."""
    return row * (row + 1) // 2


@triton.jit
def _tile(number):
    """Row and column of a tile, by its number among those on and below the diagonal, row by row."""
    root = tl.sqrt(8.0 * number.to(tl.float32) + 1.0)
    row = ((root - 1.0) * 0.5).to(tl.int32)
    row = tl.where(_tiles_before(row + 1) <= number, row + 1, row)  # the root was rounded
    row = tl.where(_tiles_before(row) > number, row - 1, row)
    return row, number - _tiles_before(row)


@triton.jit
def _places(rows, columns, width):
    """Offsets of elements in a matrix of this width."""
    return rows[:, None].to(tl.int64) * width + columns[None, :]


@triton.jit
def _product(
    x,
    y,
    added,
    out,
    n,
    k,
    alpha,
    beta,
    diagonal,
    ADDED: tl.constexpr,
    TALL: tl.constexpr,
    EVEN: tl.constexpr,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    i, j = _tile(tl.program_id(0))
    batch = tl.program_id(1).to(tl.int64)
    rows = i * SIDE + tl.arange(0, SIDE)
    columns = j * SIDE + tl.arange(0, SIDE)
    inner = tl.arange(0, DEPTH)
    first = batch * n * k
    if TALL:  # whole tiles alone: loads of the next matrix's elements would be added up
        left = x + first + _places(inner, rows, n)
        right = y + first + _places(inner, columns, n)
    elif EVEN:
        left = x + first + _places(rows, inner, k)
        right = y + first + _places(columns, inner, k)
    else:
        left = x + first + _places(rows % n, inner, k)
        right = y + first + _places(columns % n, inner, k)
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
                b = tl.load(right, mask=more, other=0.0)
                total = tl.dot(a, b.T, total)
            left += DEPTH
            right += DEPTH
    total *= alpha
    first = batch * n * n
    at = first + _places(rows, columns, n)
    mirror = first + _places(columns, rows, n)
    if EVEN and i > j:  # without masks loads and stores are of whole vectors
        if ADDED:
            total += beta * tl.load(added + at).to(tl.float32)
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + at, rounded)
        tl.store(out + mirror, rounded.T)
    else:
        row = rows[:, None]
        column = columns[None, :]
        inside = (row >= column) & (row < n)
        if ADDED:
            total += beta * tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(row == column, diagonal, 0.0)
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
    x: torch.Tensor,
    y: torch.Tensor,
    added: torch.Tensor | None,
    beta: float,
    alpha: float,
    diagonal: float,
    tall: bool,
    side: int = SIDE,
    depth: int = DEPTH,
) -> torch.Tensor:
    """alpha x y^T + beta added + diagonal, or with `tall` x^T y in the place of x y^T.

    x, y: (batch, n, k), or with `tall` (batch, k, n), which then has whole tiles (`is_even`); all
    contiguous.
    """
    batch, n, k = x.shape
    if tall:
        n, k = k, n
    out = torch.empty(batch, n, n, dtype=x.dtype, device=x.device)
    grid = (tiles_of(n, side), batch)
    _product[grid](
        x,
        y,
        out if added is None else added,
        out,
        n,
        k,
        alpha,
        beta,
        diagonal,
        ADDED=added is not None,
        TALL=tall,
        EVEN=is_even(n, k, side, depth),
        SIDE=side,
        DEPTH=depth,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out
