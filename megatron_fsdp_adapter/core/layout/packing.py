"""One segment: in which order, and at which offsets, its items lie."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .group import ParamSpec

Offsets = tuple[tuple[int, int], ...]
"""(number of the item in its group, its first element counted from the segment's start)."""


@dataclass(frozen=True)
class Packing:
    """Items of one segment: their offsets, and the segment's length and granularity."""

    offsets: Offsets
    numel: int
    granularity: int


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def pack(specs: Sequence[ParamSpec], num_shards: int, align: int) -> Packing:
    """The smallest of the packings below, and of equals the first.

    So items keep their input order wherever another order would not save anything. Searching
    further gains nothing: an item that crosses two boundaries forces its granularity on the shard.
    """
    by_granule = sorted(specs, key=lambda spec: -spec.granularity)
    candidates = [pack_in_order(order, num_shards, align) for order in (specs, by_granule)]
    if num_shards > 1 and any(spec.granularity == spec.numel > 1 for spec in specs):
        candidates.append(pack_whole_apart(specs, num_shards, align))
    return min(candidates, key=lambda packing: packing.numel)


def pack_in_order(specs: Sequence[ParamSpec], num_shards: int, align: int) -> Packing:
    """Items one after another as given, with shards of whole lcm(granularities, align).

    This is plain LCM packing, aligned: an item starts at a multiple of its granularity and of
    `align`, so every shard boundary falls between granules. An odd granularity costs a gap of up
    to lcm(granularity, align); unaligned weights would cost the matrix kernels more. One shard
    has no inner boundary, hence no granularity.
    """
    granularities = [spec.granularity if num_shards > 1 else 1 for spec in specs]
    offsets, end = [], 0
    for spec, granularity in zip(specs, granularities, strict=True):
        start = round_up(end, math.lcm(granularity, align))
        offsets.append((spec.index, start))
        end = start + spec.numel
    common = math.lcm(*granularities)
    return Packing(tuple(offsets), round_up(end, num_shards * math.lcm(common, align)), common)


def pack_whole_apart(specs: Sequence[ParamSpec], num_shards: int, align: int) -> Packing:
    """Items of one granule each fitted into shards, behind the other items.

    An item inside one shard meets no boundary, so its granularity need not divide the shard: for
    whole-tensor granularity the shard is as long as the largest tensor and not as the common
    multiple of all. The shortest shard that first fit (longest item first) can fill is bisected.
    """
    whole = sorted((s for s in specs if s.granularity == s.numel), key=lambda s: -s.numel)
    cut = pack_in_order([s for s in specs if s.granularity < s.numel], num_shards, align)
    numels = {spec.index: spec.numel for spec in specs}
    end = max((offset + numels[index] for index, offset in cut.offsets), default=0)
    unit = math.lcm(cut.granularity, align)

    def fit(units: int) -> Offsets:
        return first_fit(whole, end, units * unit, num_shards, align)

    shortest = max(whole[0].numel, -(-sum(numels.values()) // num_shards))
    longest = round_up(end, align) + sum(round_up(spec.numel, align) for spec in whole)
    lengths = range(-(-shortest // unit), -(-longest // unit))
    units = lengths.start + bisect_left(lengths, True, key=lambda n: bool(fit(n)))
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
        starts = [round_up(start, align) for start in free]
        fits = (k for k, r in enumerate(ranks) if starts[k] + spec.numel <= (r + 1) * shard)
        k = next(fits, None)
        if k is None:
            return ()
        offsets.append((spec.index, starts[k]))
        free[k] = starts[k] + spec.numel
    return tuple(offsets)
