"""Comparisons, bit for bit, of what this package makes of main weights with what Transformer Engine
makes of them: on GPUs, and on the host with a stand-in for its extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.quantized import e4m3
from megatron_fsdp_adapter.quantized.e4m3 import (
    BlockCast,
    MxCast,
    OwnRows,
    TensorCast,
    write_scales,
)
from tests.quantized.te_weights import (
    POISON,
    RECIPES,
    Case,
    cut,
    data_of,
    planes_of,
    random_case,
    scales_of,
    te_needs_rows,
    te_params,
    te_quantize,
)

ROUNDED = torch.bfloat16
SCALE = 300.0
"""Of delayed scaling; what follows of it saturates here and there."""
Bits = dict[str, torch.Tensor]


class Shard:
    """Poisoned memory for the bytes of one shard of some weights, with room around each."""

    def __init__(self, case: Case, number: int, room: int, device: str | None = None) -> None:
        self.ranges, self.room = case.ranges[number], room
        self.memory: list[torch.Tensor] = []
        self.rows = [
            self._rows(case.recipe, main.to(device or main.device), *one)
            for main, one in zip(case.mains, self.ranges, strict=True)
        ]

    def _plane(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        memory = torch.full((numel + 2 * self.room,), POISON, dtype=torch.uint8, device=like.device)
        self.memory.append(memory)
        return memory[self.room : self.room + numel]

    def _rows(self, recipe: str, main: torch.Tensor, start: int, stop: int) -> OwnRows:
        shape, flat = tuple(main.shape), main.view(-1)[start:stop].clone()
        numel = flat.numel()
        sizes = [numel, numel, numel // 32, numel // 32] if recipe == "mxfp8" else [numel]
        planes = [self._plane(size, flat) for size in sizes]
        return OwnRows(shape, start, flat, tuple(planes))

    def check_untouched(self) -> None:
        for memory in self.memory:
            around = torch.cat([memory[: self.room], memory[len(memory) - self.room :]])
            assert bool((around == POISON).all()), "bytes outside the shard were written"


def quantize(recipe: str, shards: Sequence[Shard], reduce: bool = False) -> Bits:
    """All shards at once, as ranks would with a MAX over their amaxes between the two passes; with
    `reduce` one shard, and the MAX over the ranks that there are. Returns amaxes and scales."""
    rows = [shard.rows for shard in shards]
    if recipe == "mxfp8":
        for own in rows:
            MxCast(own, ROUNDED).finish()
        return {}
    made = [(BlockCast if recipe == "blockwise" else TensorCast)(own, ROUNDED) for own in rows]
    first = made[0]
    numel = first.amax_numel
    device = rows[0][0].main.device
    amaxes = torch.zeros(len(rows), numel, device=device)
    scales = torch.full((numel,), SCALE, device=device)
    inverses = torch.full_like(scales, 7.0)
    for one, own in zip(made, amaxes, strict=True):
        if recipe == "delayed":
            one.finish(scales, own)  # type: ignore[call-arg]
        else:
            one.begin(own)
    largest = amaxes.amax(0)
    if reduce:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if recipe == "delayed":
        torch.reciprocal(scales, out=inverses)
        return {"amaxes": largest, "inverses": inverses}
    write_scales(largest, scales, inverses, powers_of_two=recipe == "blockwise")
    for one in made:
        one.finish(scales)
    return {"amaxes": largest, "scales": scales, "inverses": inverses}


def same(mine: torch.Tensor, other: torch.Tensor, label: str) -> None:
    assert mine.numel() == other.numel(), f"{label}: {mine.shape} and {other.shape}"
    # A single element is contiguous whatever its stride, and not a view of bytes for all that.
    flat = [torch.cat([one.reshape(-1), one.new_empty(0)]) for one in (mine, other)]
    a, b = (one.view(torch.uint8) for one in flat)
    differ = (a != b).nonzero().view(-1)
    if len(differ):
        at = differ[:4].tolist()
        raise AssertionError(
            f"{label}: {len(differ)} of {a.numel()} bytes differ, at {at}: "
            f"{a[differ[:4]].tolist()} and {b[differ[:4]].tolist()}"
        )


def same_planes(mine: Any, other: Any, label: str) -> None:
    """Of two quantized weights, or of copies by name."""
    one, two = (it if isinstance(it, dict) else planes_of(it) for it in (mine, other))
    assert one.keys() == two.keys(), (label, one.keys() ^ two.keys())
    for name, value in two.items():
        same(one[name], value, f"{label}, {name}")


def check_against(case: Case, params: list, shards: Sequence[Shard], label: str) -> None:
    """Bytes of all shards, and MXFP8's scales, against whole weights."""
    for number, shard in enumerate(shards):
        shard.check_untouched()
        for index, ((start, stop), own) in enumerate(zip(shard.ranges, shard.rows, strict=True)):
            name, param = f"{label}, shard {number}, weight {index}", params[index]
            same(own.planes[0], data_of(param).view(-1)[start:stop], name)
            if len(own.planes) > 1 and own.numel:
                k = case.shapes[index][1]
                rows = slice(start // k, stop // k)
                groups = slice(start // k // 32, stop // k // 32)
                columns = param._columnwise_data.view(-1)[start:stop]
                same(own.planes[1], columns, f"{name}, columns")
                same(own.planes[2], param._rowwise_scale_inv[rows, : k // 32], f"{name}, rows'")
                same(own.planes[3], param._columnwise_scale_inv[groups, :k], f"{name}, cols'")


def check_scales(case: Case, bits: Bits, params: list, slots: torch.Tensor, label: str) -> None:
    if case.recipe == "mxfp8":
        return
    theirs = torch.cat([scales_of(param).reshape(-1) for param in params])
    same(bits["inverses"], theirs, f"{label}, scales")
    if case.recipe == "delayed":
        same(bits["amaxes"], slots[:, 1], f"{label}, amaxes")


def place(rank: int) -> str:
    """The device of a rank. Two can share one."""
    if not torch.cuda.is_available():
        return "cpu"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return "cuda"


def shards_are_the_whole(rank: int, world: int, recipe: str, nasty: str, count: int) -> str:
    device, shards = place(rank), 0
    for seed in range(count):
        dtype = torch.bfloat16 if seed % 4 == 3 else torch.float32
        case = random_case(recipe, 1000 * rank + seed, dtype, nasty, device)
        slots = torch.tensor([[SCALE, 0.0]], device=device).repeat(len(case.mains), 1)
        params = te_params(recipe, case.shapes, slots)
        te_quantize(params, case.mains)
        mine = [Shard(case, number, 64 if seed % 3 else 5) for number in range(case.shards)]
        label = f"seed {seed}, {dtype}, {case.shapes}, {case.shards} shards"
        check_scales(case, quantize(recipe, mine), params, slots, label)
        check_against(case, params, mine, label)
        shards += case.shards
    return f"{count} cases, {shards} shards"


def host_is_the_device(rank: int, world: int, recipe: str, nasty: str, count: int) -> str:
    """And so is torch on the device."""
    here = place(rank)
    places: dict[str, tuple[str, AbstractContextManager]] = {
        "the host": ("cpu", nullcontext()),
        "torch": (here, mock.patch.object(e4m3, "kernels_for", lambda device: None)),
    }
    for seed in range(count):
        dtype = torch.bfloat16 if seed % 4 == 3 else torch.float32
        case = random_case(recipe, 1000 * rank + seed, dtype, nasty, here)
        device = [Shard(case, number, 64) for number in range(case.shards)]
        bits = quantize(recipe, device)
        for name, (where, way) in places.items():
            with way:
                other = [Shard(case, number, 64, where) for number in range(case.shards)]
                found = quantize(recipe, other)
            for key in bits:
                same(found[key].to(here), bits[key], f"{name}, seed {seed}, {key}")
            for one, two in zip(other, device, strict=True):
                for mine, theirs in zip(one.memory, two.memory, strict=True):
                    same(mine.to(here), theirs, f"{name}, seed {seed}, {case.shapes}")
    return f"{count} cases"


def ranks_are_te(rank: int, world: int, recipe: str, kind: str) -> str:
    """Two ranks with TE's list function over shards, and ours. kind: all weights on the first
    rank, cut, or wide and cut."""
    device = place(rank)
    slots = torch.tensor([[SCALE, 0.0]], device=device)
    te_params(recipe, [(32, 64)], slots)  # finds the extension
    if kind == "first rank only" and te_needs_rows(recipe):
        return "nothing to compare with: TE's function needs rows on every rank"
    generator = torch.Generator(device).manual_seed(7)
    shapes = {
        "wide": [(4096, 14336)],
        "first rank only": [(32, 64)],
        "cut": [(96, 128), (160, 96), (64, 32)],
    }[kind]
    mains = [torch.randn(s, device=device, generator=generator) * 0.02 for s in shapes]
    whole = [0] if kind == "first rank only" else []
    case = Case(recipe, mains, world, cut(recipe, shapes, world, whole))
    if kind == "first rank only":
        assert case.ranges[1] == [(0, 0)]
    slots = torch.tensor([[SCALE, 0.0]], device=device).repeat(len(mains), 1)
    params = te_params(recipe, shapes, slots)
    theirs = Shard(case, rank, 64)
    pieces = [
        own.planes[:2] if len(own.planes) > 1 else own.planes[0] for own in theirs.rows
    ]
    starts = [start for start, _ in theirs.ranges]
    te_quantize(params, [own.main for own in theirs.rows], starts, dist.group.WORLD, pieces)
    mine = Shard(case, rank, 64)
    bits = quantize(recipe, [mine], reduce=True)
    check_scales(case, bits, params, slots, kind)
    mine.check_untouched()
    for index, (one, two) in enumerate(zip(mine.rows, theirs.rows, strict=True)):
        for number, (plane, other) in enumerate(zip(one.planes[:2], two.planes, strict=False)):
            same(plane, other, f"{kind}, weight {index}, plane {number}")
    return f"{case.ranges[rank]}"


def nothing_waits(rank: int, world: int) -> str:
    """No pass synchronizes, once tables are there; and memory that has moved is found."""
    place(rank)
    found = {}
    for recipe in RECIPES:
        case = random_case(recipe, 3, torch.float32)
        shards = [Shard(case, number, 64) for number in range(case.shards)]
        rows = [row for shard in shards for row in shard.rows if row.numel]
        kind = {"blockwise": BlockCast, "mxfp8": MxCast}.get(recipe, TensorCast)
        cast = kind(rows, ROUNDED)  # type: ignore[operator]
        numel = getattr(cast, "amax_numel", 1)
        amaxes, scales, inverses = torch.ones(3, numel, device="cuda").unbind()
        for strict in (False, True):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if strict else "default")
            try:
                if recipe == "mxfp8":
                    cast.finish()
                else:
                    amaxes.zero_()
                    cast.begin(amaxes)
                    write_scales(amaxes, scales, inverses)
                    cast.finish(scales)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        before = cast.table()
        data = rows[0].planes[0]
        data.set_(torch.zeros_like(data).untyped_storage())
        assert cast.table() is not before and cast.table() is cast.table()
        found[recipe] = len(before.work)
    return f"programs: {found}"


