"""The kernels of `e4m3`. Imported where they are used: Triton comes with torch's CUDA builds only.

Sources and targets are addresses in a table. `multiple_of` passes on what is known of their
alignment: nothing would be loaded in vectors without it. CAST: bytes are written. SIZE: amaxes are
written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .tables import BLOCK, CHUNK, GROUP, HINT, MAX, CastTable

STEP = 2048
"""Elements of a chunk that are in registers at a time."""
BAND = 16
"""Rows of a block that are in registers at a time."""
WARPS = 8
WHOLE_WARPS = 8
"""Warps of a program that has a whole block in registers. Tried were 1024 to 8192 elements, 16 to
128 rows, and 4 or 8 warps: these are within 3% of the fastest in every pass, 4.4 to 4.7 TB/s
(H200)."""
LARGEST = torch.finfo(torch.float32).max
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def size_of(x):
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def e4m3(x, MAX: tl.constexpr):
    inside = tl.minimum(tl.maximum(x, -MAX), MAX)
    byte = inside.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(x == x, byte, 0x7F).to(tl.uint8)


@triton.jit
def _line(lines, work, WIDTH: tl.constexpr):
    """The line of a program's weight in the table, and the program's number within the weight."""
    program = work + 2 * tl.program_id(0)
    return lines + tl.load(program) * WIDTH, tl.load(program + 1)


@triton.jit
def _address(place, DTYPE: tl.constexpr):
    """The address that is at a place of a table, as a pointer."""
    return tl.load(place).to(tl.pointer_type(DTYPE))


@triton.jit
def _read(pointers, inside, ROUNDED: tl.constexpr):
    """Main weights, rounded to the nominal dtype."""
    return tl.load(pointers, mask=inside, other=0.0).to(ROUNDED).to(tl.float32)


@triton.jit
def _tensors(
    lines,
    work,
    base,
    scales,
    amaxes,
    MAIN: tl.constexpr,
    ROUNDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CAST: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    MAX: tl.constexpr,
    HINT: tl.constexpr,
):
    line, number = _line(lines, work, 4)
    index = tl.load(line)
    numel = tl.load(line + 1)
    source = _address(line + 2, MAIN)
    target = (base + tl.load(line + 3)).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        numel = tl.multiple_of(numel, HINT)
        source = tl.multiple_of(source, HINT)
        target = tl.multiple_of(target, HINT)
    first = number.to(tl.int64) * CHUNK
    size = tl.zeros([STEP], tl.float32)
    if CAST:
        scale = tl.load(scales + index)
    for step in range(0, CHUNK, STEP):
        place = first + step + tl.arange(0, STEP)
        inside = place < numel
        x = _read(source + place, inside, ROUNDED)
        if SIZE:
            size = tl.maximum(size, size_of(x))
        if CAST:
            tl.store(target + place, e4m3(x * scale, MAX), mask=inside)
    if SIZE:
        tl.atomic_max(amaxes + index, tl.max(size, 0))


@triton.jit
def _scale_of(
    amax,
    epsilon,
    POWERS: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX: tl.constexpr,
):
    amax = tl.where(amax < epsilon, epsilon, amax)
    # `/` is rounded twice; TE divides as IEEE does.
    largest_value = tl.zeros_like(amax) + MAX
    scale = tl.minimum(tl.div_rn(largest_value, amax), LARGEST)
    scale = tl.where((amax > 0) & (amax <= LARGEST), scale, 1.0)
    if POWERS:
        bits = scale.to(tl.int32, bitcast=True) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _blocks(
    lines,
    work,
    base,
    scales,
    amaxes,
    epsilon,
    MAIN: tl.constexpr,
    ROUNDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CAST: tl.constexpr,
    SIZE: tl.constexpr,
    POWERS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BAND: tl.constexpr,
    MAX: tl.constexpr,
    HINT: tl.constexpr,
):
    line, number = _line(lines, work, 7)
    start = tl.load(line + 2)
    rows = tl.load(line + 3)
    columns = tl.load(line + 4)
    source = _address(line + 5, MAIN)
    target = (base + tl.load(line + 6)).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        columns = tl.multiple_of(columns, HINT)
        source = tl.multiple_of(source, HINT)
        target = tl.multiple_of(target, HINT)
    across = tl.cdiv(columns, BLOCK)
    down = start // BLOCK + number // across
    right = number % across
    place = tl.load(line) + down * tl.load(line + 1) + right
    column = right * BLOCK + tl.arange(0, BLOCK)
    if not SIZE:
        scale = tl.load(scales + place)
    size = tl.zeros([BAND, BLOCK], tl.float32)
    for step in range(0, BLOCK, BAND):
        # Counted from this rank's first row, which may lie in the middle of a block.
        row = down * BLOCK + step + tl.arange(0, BAND) - start
        is_row = (row >= 0) & (row < rows)
        inside = is_row[:, None] & (column < columns)[None, :]
        offset = row[:, None] * columns + column[None, :]
        x = _read(source + offset, inside, ROUNDED)
        if SIZE:
            size = tl.maximum(size, size_of(x))
            if CAST:  # all of the block is here: BAND is BLOCK
                amax = tl.max(tl.max(size, 1), 0)
                scale = _scale_of(amax, epsilon, POWERS, LARGEST, MAX)
        if CAST:
            tl.store(target + offset, e4m3(x * scale, MAX), mask=inside)
    if SIZE:
        tl.store(amaxes + place, tl.max(tl.max(size, 1), 0))


@triton.jit
def _exponent(amax, INVERSE: tl.constexpr):
    bits = (amax * INVERSE).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    fraction = bits & 0x7FFFFF
    is_above_least = (exponent != 0) | (fraction > 0x400000)  # 2**-127, which exponent 0 is
    up = (fraction > 0) & (exponent != 0xFE) & is_above_least
    return tl.minimum(exponent + up.to(tl.int32), 0xFE)


@triton.jit
def _power(exponent):
    bits = tl.where(exponent == 0xFE, 0x400000, (0xFE - exponent) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _groups(
    lines,
    work,
    MAIN: tl.constexpr,
    ROUNDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    MAX: tl.constexpr,
    HINT: tl.constexpr,
    INVERSE: tl.constexpr,
):
    line, number = _line(lines, work, 6)
    columns = tl.load(line)
    source = _address(line + 1, MAIN)
    by_row = _address(line + 2, tl.uint8)
    by_column = _address(line + 3, tl.uint8)
    row_scales = _address(line + 4, tl.uint8)
    column_scales = _address(line + 5, tl.uint8)
    if ALIGNED:
        columns = tl.multiple_of(columns, HINT)
        source = tl.multiple_of(source, HINT)
        by_row = tl.multiple_of(by_row, HINT)
        by_column = tl.multiple_of(by_column, HINT)
    across = tl.cdiv(columns, BLOCK)
    down = number // across
    right = number % across
    row = down * GROUP + tl.arange(0, GROUP)
    column = right * BLOCK + tl.arange(0, BLOCK)
    band = down.to(tl.int64)
    long_row = row.to(tl.int64)[:, None]
    offset = long_row * columns + column[None, :]
    is_row = (row >= 0)[:, None]
    is_column = column < columns
    inside = is_column[None, :] & is_row
    x = _read(source + offset, inside, ROUNDED)
    size = size_of(x)

    exponent = _exponent(tl.max(size, 0), INVERSE)
    place = band * columns + column
    tl.store(column_scales + place, exponent.to(tl.uint8), mask=is_column)
    byte = e4m3(x * _power(exponent)[None, :], MAX)
    tl.store(by_column + offset, byte, mask=inside)

    EACH: tl.constexpr = BLOCK // GROUP
    groups = tl.reshape(size, (GROUP, EACH, GROUP))
    exponents = _exponent(tl.max(groups, 2), INVERSE)
    part = right * EACH + tl.arange(0, EACH)
    parts = columns // GROUP
    place = long_row * parts + part[None, :]
    is_part = (part < parts)[None, :] & is_row
    tl.store(row_scales + place, exponents.to(tl.uint8), mask=is_part)
    powers = tl.broadcast_to(_power(exponents)[:, :, None], (GROUP, EACH, GROUP))
    byte = e4m3(x * tl.reshape(powers, (GROUP, BLOCK)), MAX)
    tl.store(by_row + offset, byte, mask=inside)


@triton.jit
def _scales(
    amaxes,
    scales,
    inverses,
    numel,
    epsilon,
    POWERS: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX: tl.constexpr,
    STEP: tl.constexpr,
):
    place = tl.program_id(0) * STEP + tl.arange(0, STEP)
    inside = place < numel
    amax = tl.load(amaxes + place, mask=inside, other=1.0)
    scale = _scale_of(amax, epsilon, POWERS, LARGEST, MAX)
    tl.store(scales + place, scale, mask=inside)
    one = tl.full([STEP], 1.0, tl.float32)
    tl.store(inverses + place, tl.div_rn(one, scale), mask=inside)


def _constants(table: CastTable) -> dict[str, Any]:
    """The constants that every cast by a table is compiled for."""
    return {
        "MAIN": DTYPES[table.main],
        "ROUNDED": DTYPES[table.rounded],
        "ALIGNED": table.aligned,
        "MAX": MAX,
        "HINT": HINT,
    }


def _either(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    """`one`, or in its place `other`, if the kernel does not look at it."""
    if one is not None:
        return one
    assert other is not None
    return other


def tensors(
    table: CastTable, bases: list[int], scales: torch.Tensor | None, amaxes: torch.Tensor | None
) -> None:
    """Casts tensors; see `e4m3.TensorCast`."""
    programs = len(table.work)
    _tensors[(programs,)](
        table.lines,
        table.work,
        *bases,
        _either(scales, amaxes),
        _either(amaxes, scales),
        CAST=scales is not None,
        SIZE=amaxes is not None,
        CHUNK=CHUNK,
        STEP=STEP,
        **_constants(table),
        num_warps=WARPS,
    )


def begin_blocks(
    table: CastTable, amaxes: torch.Tensor, powers_of_two: bool, epsilon: float
) -> None:
    """Runs the first pass over blocks; see `e4m3.BlockCast`."""
    whole = table.work[: table.whole]
    cut = table.work[table.whole :]
    if len(whole):
        _run_blocks(
            table, whole, [0], amaxes, cast=True, size=True, powers=powers_of_two, epsilon=epsilon
        )
    if len(cut):
        _run_blocks(
            table, cut, [0], amaxes, cast=False, size=True, powers=powers_of_two, epsilon=epsilon
        )


def finish_blocks(table: CastTable, bases: list[int], scales: torch.Tensor) -> None:
    """Runs the second pass over blocks; see `e4m3.BlockCast`."""
    work = table.work[table.whole :]
    if len(work):
        _run_blocks(table, work, bases, scales, cast=True, size=False)


def _run_blocks(
    table: CastTable,
    work: torch.Tensor,
    bases: list[int],
    numbers: torch.Tensor,
    cast: bool,
    size: bool,
    powers: bool = False,
    epsilon: float = 0.0,
) -> None:
    """Launches the kernel of blocks. numbers: with `size` amaxes, which are written; without it
    scales, which are read."""
    is_whole = cast and size
    programs = len(work)
    _blocks[(programs,)](
        table.lines,
        work,
        *bases,
        numbers,
        numbers,
        epsilon,
        CAST=cast,
        SIZE=size,
        POWERS=powers,
        LARGEST=LARGEST,
        BLOCK=BLOCK,
        BAND=BLOCK if is_whole else BAND,
        **_constants(table),
        num_warps=WHOLE_WARPS if is_whole else WARPS,
    )


def groups(table: CastTable) -> None:
    """Casts groups; see `e4m3.MxCast`."""
    programs = len(table.work)
    _groups[(programs,)](
        table.lines,
        table.work,
        BLOCK=BLOCK,
        GROUP=GROUP,
        **_constants(table),
        INVERSE=1.0 / MAX,
        num_warps=4,
    )


def scales(
    amaxes: torch.Tensor,
    scales: torch.Tensor,
    inverses: torch.Tensor,
    powers_of_two: bool,
    epsilon: float,
) -> None:
    """Writes scales; see `e4m3.write_scales`."""
    numel = amaxes.numel()
    step = 1024
    programs = triton.cdiv(numel, step)
    _scales[(programs,)](
        amaxes,
        scales,
        inverses,
        numel,
        epsilon,
        POWERS=powers_of_two,
        LARGEST=LARGEST,
        MAX=MAX,
        STEP=step,
        num_warps=4,
    )
