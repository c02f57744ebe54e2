"""Plans the places of a group's parameters: the fewest segments whose padding is within a bound."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations

from .group import GroupLayout, ParamSpec, Placement, Segment
from .packing import Packing, pack

__all__ = ["GroupLayout", "Placement", "Segment", "plan_group"]

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

    Takes the fewest segments whose padding, over the elements of the items, is at most
    `padding_bound`; if none of 1..max_segments segments reaches it, the least padding. Never more
    padding than max_segments=1, which is plain LCM packing. `align` (elements): every shard and
    item starts at a multiple of it, by default what the format of the weights asks for (16 elements
    are 32 bytes in bf16; collectives and matrix kernels want 16). Raises ValueError for an empty
    group or an option out of bounds.
    """
    if align is None:
        align = specs[0].format.align if specs else 1
    _check_options(specs, num_shards, padding_bound, max_segments, align)

    @functools.cache
    def packed(block: frozenset[int]) -> Packing:
        items = [spec for spec in specs if spec.granularity in block]
        return pack(items, num_shards, align)

    allowed = sum(spec.numel for spec in specs) * (1 + padding_bound)
    best: tuple[Packing, ...] = ()
    classes = _merge_classes(dict.fromkeys(spec.granularity for spec in specs), packed)
    for num_segments in range(1, min(max_segments, len(classes)) + 1):
        partitions = _partitions(classes, num_segments)
        found = min((tuple(map(packed, blocks)) for blocks in partitions), key=_total)
        if not best or _total(found) < _total(best):
            best = found
        if _total(best) <= allowed:
            break
    return _build(tuple(specs), best, num_shards, align)


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
    """One class per granularity, the cheapest pairs merged until they can be enumerated. packed:
    the segment that a set of granularities becomes."""
    classes = [frozenset([granularity]) for granularity in granularities]
    while len(classes) > MAX_ENUMERATED_CLASSES:

        def growth(pair: tuple[frozenset[int], frozenset[int]]) -> int:
            merged = packed(pair[0] | pair[1]).numel
            return merged - packed(pair[0]).numel - packed(pair[1]).numel

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
    *rest, last = classes
    for blocks in _partitions(tuple(rest), num_blocks):
        for k, block in enumerate(blocks):
            yield (*blocks[:k], block | last, *blocks[k + 1 :])
    if num_blocks > 1:
        for blocks in _partitions(tuple(rest), num_blocks - 1):
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
