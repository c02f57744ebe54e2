"""The kernels of `e4m3`. Imported where they are used: Triton comes with torch's CUDA builds only.

Sources and targets are addresses in a table. What is known of their alignment is passed with
`multiple_of`, or nothing would be loaded in vectors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tables import BLOCK, CHUNK, GROUP, HINT, MAX, CastTable

STEP, BAND, WARPS, WHOLE_WARPS = 2048, 16, 8, 8
"""Elements of a chunk, and rows of a block, that are in registers at a time; warps of a program,
and of one that has a whole block in registers. Of 1024 to 8192 elements, 16 to 128 rows and 4 or 8
warps these were within 3% of the fastest in every pass: 4.4 to 4.7 TB/s (H200)."""
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
    program = tl.program_id(0)
    line = lines + tl.load(work + 2 * program) * 4
    number = tl.load(work + 2 * program + 1)
    index = tl.load(line)
    numel = tl.load(line + 1)
    source = tl.load(line + 2).to(tl.pointer_type(MAIN))
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
        x = tl.load(source + place, mask=inside, other=0.0).to(ROUNDED).to(tl.float32)
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
    scale = tl.minimum(tl.div_rn(tl.zeros_like(amax) + MAX, amax), LARGEST)
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
    program = tl.program_id(0)
    line = lines + tl.load(work + 2 * program) * 7
    number = tl.load(work + 2 * program + 1)
    start = tl.load(line + 2)
    rows = tl.load(line + 3)
    columns = tl.load(line + 4)
    source = tl.load(line + 5).to(tl.pointer_type(MAIN))
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
        inside = ((row >= 0) & (row < rows))[:, None] & (column < columns)[None, :]
        offset = row[:, None] * columns + column[None, :]
        x = tl.load(source + offset, mask=inside, other=0.0).to(ROUNDED).to(tl.float32)
        if SIZE:
            size = tl.maximum(size, size_of(x))
            if CAST:  # all of the block is here: BAND is BLOCK
                scale = _scale_of(tl.max(tl.max(size, 1), 0), epsilon, POWERS, LARGEST, MAX)
        if CAST:
            tl.store(target + offset, e4m3(x * scale, MAX), mask=inside)
    if SIZE:
        tl.store(amaxes + place, tl.max(tl.max(size, 1), 0))


@triton.jit
def _exponent(amax, INVERSE: tl.constexpr):
    bits = (amax * INVERSE).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    fraction = bits & 0x7FFFFF
    up = (fraction > 0) & (exponent != 0xFE) & ((exponent != 0) | (fraction > 0x400000))
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
    program = tl.program_id(0)
    line = lines + tl.load(work + 2 * program) * 6
    number = tl.load(work + 2 * program + 1)
    columns = tl.load(line)
    source = tl.load(line + 1).to(tl.pointer_type(MAIN))
    by_row = tl.load(line + 2).to(tl.pointer_type(tl.uint8))
    by_column = tl.load(line + 3).to(tl.pointer_type(tl.uint8))
    row_scales = tl.load(line + 4).to(tl.pointer_type(tl.uint8))
    column_scales = tl.load(line + 5).to(tl.pointer_type(tl.uint8))
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
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (column < columns)[None, :] & (row >= 0)[:, None]
    x = tl.load(source + offset, mask=inside, other=0.0).to(ROUNDED).to(tl.float32)
    size = size_of(x)

    exponent = _exponent(tl.max(size, 0), INVERSE)
    tl.store(
        column_scales + down.to(tl.int64) * columns + column,
        exponent.to(tl.uint8),
        mask=column < columns,
    )
    tl.store(by_column + offset, e4m3(x * _power(exponent)[None, :], MAX), mask=inside)

    EACH: tl.constexpr = BLOCK // GROUP
    exponents = _exponent(tl.max(tl.reshape(size, (GROUP, EACH, GROUP)), 2), INVERSE)
    part = right * EACH + tl.arange(0, EACH)
    tl.store(
        row_scales + row.to(tl.int64)[:, None] * (columns // GROUP) + part[None, :],
        exponents.to(tl.uint8),
        mask=(part < columns // GROUP)[None, :] & (row >= 0)[:, None],
    )
    powers = tl.broadcast_to(_power(exponents)[:, :, None], (GROUP, EACH, GROUP))
    tl.store(by_row + offset, e4m3(x * tl.reshape(powers, (GROUP, BLOCK)), MAX), mask=inside)


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


def _either(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    """A tensor in place of one that the kernel does not look at."""
    found = one if one is not None else other
    assert found is not None
    return found


def tensors(
    table: CastTable, bases: list[int], scales: torch.Tensor | None, amaxes: torch.Tensor | None
) -> None:
    """Casts tensors; see `e4m3.TensorCast`."""
    _tensors[(len(table.work),)](
        table.lines,
        table.work,
        *bases,
        _either(scales, amaxes),
        _either(amaxes, scales),
        DTYPES[table.main],
        DTYPES[table.rounded],
        table.aligned,
        scales is not None,
        amaxes is not None,
        CHUNK,
        STEP,
        MAX,
        HINT,
        num_warps=WARPS,
    )


def begin_blocks(
    table: CastTable, amaxes: torch.Tensor, powers_of_two: bool, epsilon: float
) -> None:
    """Begins to cast blocks; see `e4m3.BlockCast`."""
    cut = table.work[table.whole :]
    for work, cast in ((table.work[: table.whole], True), (cut, False)):
        if len(work):
            _run_blocks(table, work, [0], amaxes, amaxes, cast, True, powers_of_two, epsilon)


def finish_blocks(table: CastTable, bases: list[int], scales: torch.Tensor) -> None:
    """Casts the rest of blocks; see `e4m3.BlockCast`."""
    work = table.work[table.whole :]
    if len(work):
        _run_blocks(table, work, bases, scales, scales, True, False)


def _run_blocks(
    table: CastTable,
    work: torch.Tensor,
    bases: list[int],
    scales: torch.Tensor,
    amaxes: torch.Tensor,
    cast: bool,
    size: bool,
    powers_of_two: bool = False,
    epsilon: float = 0.0,
) -> None:
    band, warps = (BLOCK, WHOLE_WARPS) if cast and size else (BAND, WARPS)
    _blocks[(len(work),)](
        table.lines,
        work,
        *bases,
        scales,
        amaxes,
        epsilon,
        DTYPES[table.main],
        DTYPES[table.rounded],
        table.aligned,
        cast,
        size,
        powers_of_two,
        LARGEST,
        BLOCK,
        band,
        MAX,
        HINT,
        num_warps=warps,
    )


def groups(table: CastTable) -> None:
    """Casts groups; see `e4m3.MxCast`."""
    _groups[(len(table.work),)](
        table.lines,
        table.work,
        DTYPES[table.main],
        DTYPES[table.rounded],
        table.aligned,
        BLOCK,
        GROUP,
        MAX,
        HINT,
        1.0 / MAX,
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
    numel, step = amaxes.numel(), 1024
    _scales[(triton.cdiv(numel, step),)](
        amaxes,
        scales,
        inverses,
        numel,
        epsilon,
        powers_of_two,
        LARGEST,
        MAX,
        step,
        num_warps=4,
    )
