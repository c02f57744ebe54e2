"""Plans the places of a group's parameters.

`plan_group` packs them: the fewest segments whose padding is within a bound. `pack` decides in
which order, and at which offsets, the items of one segment lie.

`plan_even` gives each parameter a segment of its own, which is split as torch splits it.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from .group import GroupLayout, ParamSpec, Placement, Segment, even_shard_numel
from .ranges import divide_up

Offsets = tuple[tuple[int, int], ...]
"""(number of the item in its group, its first element counted from the segment's start)."""


@dataclass(frozen=True)
class Packing:
    """Items packed into one segment; `numel` and `granularity` are the segment's."""

    offsets: Offsets
    numel: int
    granularity: int


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return divide_up(value, multiple) * multiple


def pack(specs: Sequence[ParamSpec], num_shards: int, align: int) -> Packing:
    """The smallest of the packings below; of several, the first.

    So items keep their input order unless another order saves something. Searching further gains
    nothing: an item that crosses two boundaries forces its granularity on the shard.
    """
    by_granule = sorted(specs, key=lambda spec: -spec.granularity)
    candidates = [
        pack_in_order(specs, num_shards, align),
        pack_in_order(by_granule, num_shards, align),
    ]
    if num_shards > 1 and any(spec.granularity == spec.numel > 1 for spec in specs):
        candidates.append(pack_whole_apart(specs, num_shards, align))
    return min(candidates, key=lambda packing: packing.numel)


def pack_in_order(specs: Sequence[ParamSpec], num_shards: int, align: int) -> Packing:
    """Items one after another as given, in shards of a multiple of lcm(granularities, align).

    This is plain LCM packing, aligned. An item starts at a multiple of its granularity and of
    `align`, so every shard boundary falls between granules. An odd granularity costs a gap of up
    to lcm(granularity, align); unaligned weights would cost the matrix kernels more. A single shard
    has no boundary inside, so all granularities count as 1.
    """
    granularities = [spec.granularity if num_shards > 1 else 1 for spec in specs]
    offsets = []
    end = 0
    for spec, granularity in zip(specs, granularities, strict=True):
        start = round_up(end, math.lcm(granularity, align))
        offsets.append((spec.index, start))
        end = start + spec.numel
    common = math.lcm(*granularities)
    numel = round_up(end, num_shards * math.lcm(common, align))
    return Packing(tuple(offsets), numel, common)


def pack_whole_apart(specs: Sequence[ParamSpec], num_shards: int, align: int) -> Packing:
    """Items that are one granule each are fitted into single shards, behind the other items.

    An item inside one shard meets no boundary, so its granularity need not divide the shard. With
    whole-tensor granularities the shard then is about as long as the largest tensor, and not as
    long as their common multiple. Bisection finds the shortest shard for which first fit (longest
    item first) places all items.
    """
    whole = [spec for spec in specs if spec.granularity == spec.numel]
    whole.sort(key=lambda spec: -spec.numel)
    others = [spec for spec in specs if spec.granularity < spec.numel]
    cut = pack_in_order(others, num_shards, align)
    numels = {spec.index: spec.numel for spec in specs}
    end = 0
    for index, offset in cut.offsets:
        end = max(end, offset + numels[index])
    unit = math.lcm(cut.granularity, align)

    def fit(units: int) -> Offsets:
        return first_fit(whole, end, units * unit, num_shards, align)

    shortest = max(whole[0].numel, divide_up(sum(numels.values()), num_shards))
    longest = round_up(end, align)
    for spec in whole:
        longest += round_up(spec.numel, align)
    fewest = divide_up(shortest, unit)
    lengths = range(fewest, divide_up(longest, unit))
    units = fewest + bisect_left(lengths, True, key=lambda n: bool(fit(n)))
    return Packing((*cut.offsets, *fit(units)), num_shards * units * unit, cut.granularity)


def first_fit(
    whole: Sequence[ParamSpec], end: int, shard: int, num_shards: int, align: int
) -> Offsets:
    """Offsets of `whole` items, each inside one shard, behind element `end`; () if not all fit."""
    first = end // shard
    ranks = range(first, min(num_shards, first + 1 + len(whole)))
    free = [max(end, rank * shard) for rank in ranks]
    offsets = []
    for spec in whole:
        for k, rank in enumerate(ranks):
            start = round_up(free[k], align)
            stop = start + spec.numel
            if stop <= (rank + 1) * shard:
                offsets.append((spec.index, start))
                free[k] = stop
                break
        else:
            return ()
    return tuple(offsets)


MAX_ENUMERATED_CLASSES = 7
"""Set partitions of 7 classes are 877; more classes are merged first (see `_merge_classes`)."""

Classes = tuple[frozenset[int], ...]
"""Disjoint sets of granularities: each set becomes one segment."""


def plan_group(
    specs: Sequence[ParamSpec],
    num_shards: int,
    *,
    padding_bound: float = 0.01,
    max_segments: int = 4,
    align: int | None = None,
) -> GroupLayout:
    """The layout of `specs` over `num_shards` equal shards; the same on every rank.

    Takes the fewest segments whose padding, as a fraction of the items' elements, is at most
    `padding_bound`. If no number up to `max_segments` reaches that, takes the least padding. There
    is never more padding than with one segment.

    align: every shard and item starts at a multiple of so many elements; by default of what the
        format of the weights asks for (16 elements are 32 bytes in bf16; collectives and matrix
        kernels want 16).
    Raises ValueError for an empty group or an option out of bounds.
    """
    if align is None:
        align = specs[0].format.align if specs else 1
    _check_options(specs, num_shards, padding_bound, max_segments, align)

    @functools.cache
    def packed(block: frozenset[int]) -> Packing:
        return pack([spec for spec in specs if spec.granularity in block], num_shards, align)

    allowed = sum(spec.numel for spec in specs) * (1 + padding_bound)
    best: tuple[Packing, ...] = ()
    classes = _merge_classes(dict.fromkeys(spec.granularity for spec in specs), packed)
    for num_segments in range(1, min(max_segments, len(classes)) + 1):
        partitions = _partitions(classes, num_segments)
        candidates = [tuple(map(packed, blocks)) for blocks in partitions]
        found = min(candidates, key=_total)
        if not best or _total(found) < _total(best):
            best = found
        if _total(best) <= allowed:
            break
    return _build(tuple(specs), best, num_shards, align)


def plan_even(specs: Sequence[ParamSpec], num_shards: int) -> GroupLayout:
    """The layout in which each shard of a parameter is that of torch's `Shard(0)`.

    A parameter is a segment. With n shards, each but the last ones with rows has ceil(rows / n) of
    them. A segment starts where all its parts are aligned, so there may be gaps between segments.
    One shard has no boundaries: then, and where a boundary would cut a granule of a quantized
    format, the layout is that of `plan_group`.
    Raises ValueError for an empty group or an option out of bounds.
    """
    sizes = [even_shard_numel(spec, num_shards) for spec in specs] if num_shards > 1 else []
    cuts = any(size % spec.granularity for size, spec in zip(sizes, specs, strict=bool(sizes)))
    if not sizes or cuts:
        return plan_group(specs, num_shards)
    align = specs[0].format.align
    segments = []
    placements = []
    start = 0
    for number, (spec, size) in enumerate(zip(specs, sizes, strict=True)):
        segments.append(Segment(start, num_shards * size, spec.granularity, num_shards))
        placements.append(Placement(number, start))
        start += num_shards * round_up(size, align)
    tail = start - segments[-1].offset - segments[-1].numel
    return GroupLayout(tuple(specs), tuple(segments), tuple(placements), num_shards, align, tail)


def _check_options(
    specs: Sequence[ParamSpec],
    num_shards: int,
    padding_bound: float,
    max_segments: int,
    align: int,
) -> None:
    if not specs:
        raise ValueError("specs is empty: a group has at least one parameter")
    for position, spec in enumerate(specs):
        if spec.index != position:
            raise ValueError(
                f"{spec.fqns[0]}: index {spec.index}, but position {position} in the group"
            )
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards} must be at least 1")
    if padding_bound < 0:
        raise ValueError(f"padding_bound={padding_bound} must not be negative")
    if max_segments < 1:
        raise ValueError(f"max_segments={max_segments} must be at least 1")
    if align < 1:
        raise ValueError(f"align={align} must be at least 1")


def _total(packings: tuple[Packing, ...]) -> int:
    return sum(packing.numel for packing in packings)


def _merge_classes(
    granularities: Iterable[int], packed: Callable[[frozenset[int]], Packing]
) -> Classes:
    """One class for each granularity. The pairs that are cheapest to merge are merged until all
    partitions can be enumerated. packed: gives the segment of a set of granularities."""
    classes = [frozenset([granularity]) for granularity in granularities]
    while len(classes) > MAX_ENUMERATED_CLASSES:

        def growth(pair: tuple[frozenset[int], frozenset[int]]) -> int:
            one, other = pair
            return packed(one | other).numel - packed(one).numel - packed(other).numel

        first, second = min(combinations(classes, 2), key=growth)
        classes[classes.index(first)] = first | second
        classes.remove(second)
    return tuple(classes)


def _partitions(classes: Classes, num_blocks: int) -> Iterator[Classes]:
    """Every way to put the classes into exactly `num_blocks` blocks, in a fixed order."""
    if num_blocks < 1 or len(classes) < num_blocks:
        return
    if len(classes) == num_blocks:
        yield classes
        return
    rest = classes[:-1]
    last = classes[-1]
    for blocks in _partitions(rest, num_blocks):
        for k, block in enumerate(blocks):
            yield (*blocks[:k], block | last, *blocks[k + 1 :])
    if num_blocks > 1:
        for blocks in _partitions(rest, num_blocks - 1):
            yield (*blocks, last)


def _build(
    specs: tuple[ParamSpec, ...], packings: tuple[Packing, ...], num_shards: int, align: int
) -> GroupLayout:
    segments: list[Segment] = []
    placements: dict[int, Placement] = {}
    base = 0
    for number, packing in enumerate(packings):
        segments.append(Segment(base, packing.numel, packing.granularity, num_shards))
        for index, offset in packing.offsets:
            placements[index] = Placement(number, base + offset)
        base += packing.numel
    ordered = tuple(placements[index] for index in range(len(specs)))
    return GroupLayout(specs, tuple(segments), ordered, num_shards, align)
