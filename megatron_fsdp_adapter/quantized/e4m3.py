"""Casts the rows that this rank holds of many weights to E4M3 bytes.

Every pass over all weights is one launch on CUDA (Triton), or two where blocks are cut. Nothing
waits for the device: what a pass needs of each weight is in a table on the device, and amaxes and
scales stay there. Without Triton, and on the host, torch does the same weight by weight, to the
same bits.

The arithmetic is Transformer Engine's for main weights, bit for bit: an element is rounded to the
weight's nominal dtype first, NaN does not count for an amax, a scale is 448 / amax rounded once (1
where the amax is 0 or not finite, the largest float32 where the quotient is not finite), values
saturate, and NaN is the byte 0x7F.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import TypeVar

import torch

from megatron_fsdp_adapter.core.kernels import kernel_or_warning
from megatron_fsdp_adapter.core.layout.ranges import Shape

from .tables import BLOCK, CHUNK, GROUP, HINT, MAX, CastTable
from .weights import QuantizedWeight


@dataclass(frozen=True)
class LocalRows:
    """This rank's part of one weight of `shape`: its elements from `start` on."""

    shape: Shape
    start: int
    # (n,) main weights, float32 or 16 bits, contiguous; n may be 0.
    main: torch.Tensor
    # Written by the cast; uint8, flat and contiguous. First (n,) bytes. MXFP8, of which a shard has
    # whole groups, has three more: the (n,) bytes along columns, and the exponents of
    # (rows, k / 32) groups along rows and of (rows / 32, k) along columns.
    planes: tuple[torch.Tensor, ...]

    @property
    def numel(self) -> int:
        return self.main.numel()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.main, *self.planes

    @property
    def rows(self) -> range:
        """The rows of the matrix that are here. ValueError if the weight is no matrix, or the
        elements are not whole rows."""
        columns = self.shape[-1]
        numel = self.numel
        if len(self.shape) != 2 or self.start % columns or numel % columns:
            raise ValueError(
                f"{numel} elements from {self.start} of {self.shape}: not rows of a matrix"
            )
        return range(self.start // columns, (self.start + numel) // columns)

    @property
    def blocks_across(self) -> int:
        """Number of blocks side by side in the matrix."""
        return -(-self.shape[1] // BLOCK)

    @property
    def bands(self) -> slice:
        """The rows of blocks that have some of these rows."""
        rows = self.rows
        return slice(rows.start // BLOCK, (rows.stop - 1) // BLOCK + 1)


def scales_shape(shape: Shape) -> tuple[int, int]:
    """The shape of the scales of a matrix's blocks: columns are padded to a multiple of 4."""
    rows = -(-shape[0] // BLOCK)
    columns = -(-shape[1] // BLOCK)
    return rows, -(-columns // 4) * 4


def write_scales(
    amaxes: torch.Tensor,
    scales: torch.Tensor,
    inverses: torch.Tensor,
    powers_of_two: bool = False,
    epsilon: float = 0.0,
) -> None:
    """Writes the scale of each amax, and its inverse; all are float32 of shape (n,).

    powers_of_two: rounds each scale down to a power of two. epsilon: the least amax; a smaller one
    counts as this."""
    kernels = kernels_for(amaxes.device)
    if kernels is not None:
        kernels.scales(amaxes, scales, inverses, powers_of_two, epsilon)
        return
    sizes = torch.where(amaxes < epsilon, torch.full_like(amaxes, epsilon), amaxes)
    # Not `MAX / sizes`: torch multiplies by the reciprocal then, and rounds twice.
    found = torch.full_like(sizes, MAX).div_(sizes)
    found.clamp_max_(torch.finfo(torch.float32).max)
    found.masked_fill_((sizes == 0) | ~sizes.isfinite(), 1.0)
    if powers_of_two:
        found = (found.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    scales.copy_(found)
    torch.reciprocal(found, out=inverses)


CastKind = TypeVar("CastKind", bound="Cast")
NO_ROWS: Mapping[int, LocalRows] = MappingProxyType({})


class Cast:
    """The rows of many weights, with the table that kernels read, made when it is first needed.

    If planes come and go (`only`), the table has their offsets in their storages. A kernel is given
    the beginnings of the storages when it runs. So no new table has to go to the device.
    """

    def __init__(self, rows: Sequence[LocalRows], rounded: torch.dtype) -> None:
        self.rows = tuple(rows)
        self.rounded = rounded
        # Numbers of the weights that this rank has rows of.
        self.held = [index for index, own in enumerate(self.rows) if own.numel]
        mains = [self.rows[index].main for index in self.held]
        if len({(main.dtype, main.device) for main in mains}) > 1:
            raise ValueError("main weights that are cast together must have one dtype and device")
        # Whether planes come and go.
        self._moves = False
        # The table, and the addresses that it has.
        self._table: CastTable | None = None
        self._addresses: list[int] = []

    def only(
        self: CastKind, chosen: Container[int], moves: bool, rows: Mapping[int, LocalRows] = NO_ROWS
    ) -> CastKind:
        """A cast of the weights whose numbers are `chosen`. Their scales keep their places.

        moves: planes come and go. Those of one kind that are cast together are in one storage then.
        rows: by number, rows that replace those of this cast."""
        made = copy.copy(self)
        made.rows = tuple(rows.get(index, own) for index, own in enumerate(self.rows))
        made.held = [index for index in self.held if index in chosen]
        made._moves = moves
        made._table = None
        made._addresses = []
        return made

    def bases(self) -> list[int]:
        """For each plane, the number that kernels add to its addresses in the table."""
        planes = self.rows[self.held[0]].planes
        if not self._moves:
            return [0] * len(planes)
        return [plane.untyped_storage().data_ptr() for plane in planes]

    def _numbers(self, index: int) -> tuple[list[int], int]:
        """The numbers of a weight in its line of the table, of which the last one must be a
        multiple of `HINT` to be aligned; and the number of programs that it takes."""
        own = self.rows[index]
        return [index, own.numel], -(-own.numel // CHUNK)

    def _kernels(self) -> ModuleType | None:
        if not self.held:
            return None
        return kernels_for(self.rows[self.held[0]].main.device)

    def table(self) -> CastTable:
        """The table of the present addresses; made again when memory has moved."""
        addresses: list[int] = []
        for index in self.held:
            addresses += self._places(self.rows[index])
        if self._table is None or addresses != self._addresses:
            self._table = self._make_table(addresses)
            self._addresses = addresses
        return self._table

    def _places(self, own: LocalRows) -> list[int]:
        """The addresses of its tensors; for planes that come and go, offsets in their storages."""
        if self._moves:
            return [own.main.data_ptr(), *(int(plane.storage_offset()) for plane in own.planes)]
        return [tensor.data_ptr() for tensor in own.tensors]

    def _make_table(self, addresses: list[int]) -> CastTable:
        main = self.rows[self.held[0]].main
        per_weight = len(addresses) // len(self.held)
        lines = []
        counts = []
        aligned = True
        for place, index in enumerate(self.held):
            numbers, count = self._numbers(index)
            where = addresses[place * per_weight : (place + 1) * per_weight]
            lines.append(numbers + where)
            counts.append(count)
            main_at, first_plane_at = where[:2]
            if any(value % HINT for value in (numbers[-1], main_at, first_plane_at)):
                aligned = False
        programs = torch.tensor(counts, device="cpu")
        line = torch.arange(len(counts), device="cpu").repeat_interleave(programs)
        firsts = programs.cumsum(0) - programs
        within = torch.arange(len(line), device="cpu") - firsts[line]
        work = torch.stack([line, within], 1).to(torch.int32)
        return CastTable(
            lines=torch.tensor(lines, device="cpu").to(main.device),
            work=work.to(main.device),
            main=main.dtype,
            rounded=self.rounded,
            aligned=aligned,
        )


class TensorCast(Cast):
    """One scale a weight: scales and amaxes are (weights,) float32."""

    @property
    def amax_numel(self) -> int:
        return len(self.rows)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each weight's part of flat scales, (1,)."""
        return list(flat.split(1))

    def begin(self, amaxes: torch.Tensor) -> None:
        """Raises each amax to that of this rank's rows."""
        self._run(None, amaxes)

    def finish(self, scales: torch.Tensor, amaxes: torch.Tensor | None = None) -> None:
        """Writes all bytes. `amaxes`, if given, are raised in the same pass: for scales that were
        made of earlier amaxes."""
        self._run(scales, amaxes)

    def _run(self, scales: torch.Tensor | None, amaxes: torch.Tensor | None) -> None:
        kernels = self._kernels()
        if kernels is not None:
            kernels.tensors(self.table(), self.bases(), scales, amaxes)
            return
        for index in self.held:
            own = self.rows[index]
            values = round_to(own.main, self.rounded)
            if amaxes is not None:
                torch.maximum(amaxes[index], sizes_of(values).amax(), out=amaxes[index])
            if scales is not None:
                own.planes[0].copy_(e4m3_of(values * scales[index]))


class BlockCast(Cast):
    """One scale for each block of 128 rows and columns. Scales and amaxes are flat float32: those
    of one weight after the other, each of `scales_shape`. Shards may be cut at any row.

    There are two passes, and maxima over ranks are taken between them. The first pass writes
    amaxes. On CUDA it also writes the bytes of blocks that this rank has all of, whose scales need
    no other rank: most blocks are such, and main weights are read once for them. The second pass
    writes the other bytes, and all bytes of planes that come and go."""

    def __init__(
        self,
        rows: Sequence[LocalRows],
        rounded: torch.dtype,
        powers_of_two: bool = True,
        epsilon: float = 0.0,
    ) -> None:
        super().__init__(rows, rounded)
        self.powers_of_two = powers_of_two
        self.epsilon = epsilon
        # Of each weight's scales: their shape, and where they begin among all.
        self.shapes = [scales_shape(own.shape) for own in self.rows]
        self.firsts: list[int] = []
        self.amax_numel = 0
        for shape in self.shapes:
            self.firsts.append(self.amax_numel)
            self.amax_numel += math.prod(shape)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each weight's part of flat scales, in its shape."""
        found = []
        for first, shape in zip(self.firsts, self.shapes, strict=True):
            found.append(flat[first : first + math.prod(shape)].view(shape))
        return found

    def _numbers(self, index: int) -> tuple[list[int], int]:
        own = self.rows[index]
        rows = own.rows
        bands = own.bands
        numbers = [self.firsts[index], self.shapes[index][1], rows.start, len(rows), own.shape[1]]
        return numbers, (bands.stop - bands.start) * own.blocks_across

    def _make_table(self, addresses: list[int]) -> CastTable:
        """The table, with the programs of blocks that this rank has all of first."""
        table = super()._make_table(addresses)
        numbers = []
        for index in self.held:
            own = self.rows[index]
            rows = own.rows
            numbers.append([rows.start, rows.stop, own.blocks_across, own.shape[0]])
        line, within = table.work.cpu().long().unbind(1)
        start, stop, across, height = torch.tensor(numbers, device="cpu")[line].unbind(1)
        top = (start // BLOCK + within // across) * BLOCK
        bottom = torch.minimum(top + BLOCK, height)
        whole = (top >= start) & (bottom <= stop)
        if self._moves:
            whole.zero_()  # the first pass writes no bytes of planes that may be gone
        order = torch.cat([whole.nonzero(), (~whole).nonzero()]).view(-1)
        work = table.work[order.to(table.work.device)]
        return replace(table, work=work, whole=int(whole.sum()))

    def begin(self, amaxes: torch.Tensor) -> None:
        """Sets the amaxes of blocks that this rank has a part of, each to the amax of the part. The
        other ones stay."""
        kernels = self._kernels()
        if kernels is not None:
            kernels.begin_blocks(self.table(), amaxes, self.powers_of_two, self.epsilon)
            return
        for index in self.held:
            own = self.rows[index]
            across, down = self._blocks(own)
            values = round_to(own.main, self.rounded)
            places = down[:, None] * self.shapes[index][1] + across
            part = self.views(amaxes)[index]
            part[own.bands, : own.blocks_across] = 0.0
            part.view(-1).scatter_reduce_(0, places.view(-1), sizes_of(values), "amax")

    def finish(self, scales: torch.Tensor) -> None:
        """Writes the bytes that `begin` has not written. scales: made by `write_scales`, with this
        cast's options, of the maxima over ranks."""
        kernels = self._kernels()
        if kernels is not None:
            kernels.finish_blocks(self.table(), self.bases(), scales)
            return
        for index in self.held:
            own = self.rows[index]
            across, down = self._blocks(own)
            values = round_to(own.main, self.rounded).view(len(down), -1)
            factors = self.views(scales)[index][down][:, across]
            own.planes[0].copy_(e4m3_of(values * factors).view(-1))

    @staticmethod
    def _blocks(own: LocalRows) -> tuple[torch.Tensor, torch.Tensor]:
        """For each column the column of its block, and for each row here the row of its block."""
        rows = own.rows
        device = own.main.device
        across = torch.arange(own.shape[1], device=device) // BLOCK
        down = torch.arange(rows.start, rows.stop, device=device) // BLOCK
        return across, down


class MxCast(Cast):
    """MXFP8, as a `Quantizer`. Its scales are powers of two, one for 32 neighbors. A shard has
    whole groups of them, so no other rank has to agree."""

    amax_numel = 0

    def bind(self, amaxes: torch.Tensor) -> None:
        """Does nothing: there are no maxima."""

    def begin(self) -> None:
        """Does nothing: no maxima are agreed upon."""

    def writer(self, weights: Sequence[QuantizedWeight]) -> Callable[[], None]:
        raise AssertionError("MXFP8 planes are kept")

    def _numbers(self, index: int) -> tuple[list[int], int]:
        own = self.rows[index]
        groups = len(own.rows) // GROUP
        return [own.shape[1]], groups * own.blocks_across

    def finish(self) -> None:
        """Writes bytes and scales, along rows and along columns."""
        kernels = self._kernels()
        if kernels is not None:
            kernels.groups(self.table())
            return
        for index in self.held:
            own = self.rows[index]
            by_row, by_column, row_scales, column_scales = own.planes
            values = round_to(own.main, self.rounded).view(-1, own.shape[1])
            sizes = sizes_of(values)
            # Along rows.
            amaxes = sizes.view(len(values), -1, GROUP).amax(2)
            exponents = _exponents(amaxes)
            factors = _powers(exponents).repeat_interleave(GROUP, 1)
            row_scales.copy_(exponents.view(-1))
            by_row.copy_(e4m3_of(values * factors).view(-1))
            # Along columns.
            amaxes = sizes.view(-1, GROUP, own.shape[1]).amax(1)
            exponents = _exponents(amaxes)
            factors = _powers(exponents).repeat_interleave(GROUP, 0)
            column_scales.copy_(exponents.view(-1))
            by_column.copy_(e4m3_of(values * factors).view(-1))


def round_to(main: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return main.to(dtype).to(torch.float32)


def sizes_of(values: torch.Tensor) -> torch.Tensor:
    return values.abs().nan_to_num_(nan=0.0, posinf=math.inf)


def e4m3_of(values: torch.Tensor) -> torch.Tensor:
    found = values.clamp(-MAX, MAX).to(torch.float8_e4m3fn)
    return found.view(torch.uint8).masked_fill_(values.isnan(), 0x7F)


def _exponents(amaxes: torch.Tensor) -> torch.Tensor:
    """E8M0, rounded up, of amax / 448; 0xFE for infinity."""
    values = amaxes * (1.0 / MAX)
    bits = values.view(torch.int32)
    exponent = bits >> 23
    fraction = bits & 0x7FFFFF
    is_least = (exponent == 0) & (fraction <= 0x400000)  # up to 2**-127, which exponent 0 is
    up = (fraction > 0) & (exponent != 0xFE) & ~is_least
    return (exponent + up).clamp_max_(0xFE).to(torch.uint8)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """The inverses, in float32, of the powers of two that E8M0 exponents stand for. The one of 0xFE
    is subnormal."""
    bits = (0xFE - exponents.to(torch.int32)) << 23
    return bits.masked_fill_(exponents == 0xFE, 0x400000).view(torch.float32)


@functools.cache
def kernels_for(device: torch.device) -> ModuleType | None:
    """The kernels; None on the host, and where Triton cannot be used."""
    if device.type != "cuda":
        return None

    def tried() -> ModuleType:
        from . import triton_e4m3 as kernels

        one = torch.ones(1, dtype=torch.float32, device=device)
        kernels.scales(one, one, one.clone(), False, 0.0)
        return kernels

    return kernel_or_warning(
        tried, "weights are quantized by torch, one by one, which takes several times as long"
    )
