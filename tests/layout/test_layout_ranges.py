"""Ranges and the blocks that a flat range is in a tensor's own axes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.layout import (
    EMPTY,
    FlatRange,
    flat_range_to_boxes,
    nested_shard_rank,
    split_evenly,
)


@st.composite
def ranges(draw: st.DrawFn, stop: int = 60) -> FlatRange:
    first, last = sorted((draw(st.integers(0, stop)), draw(st.integers(0, stop))))
    return FlatRange(first, last)


@given(ranges(), ranges())
def test_intersection_is_that_of_the_sets(a: FlatRange, b: FlatRange) -> None:
    common = set(range(a.start, a.stop)) & set(range(b.start, b.stop))
    found = a.intersect(b)
    assert set(range(found.start, found.stop)) == common
    assert found.numel == len(common) and found.empty == (not common)
    assert (found == EMPTY) == (not common)
    inside = set(range(b.start, b.stop)) <= set(range(a.start, a.stop))
    assert a.contains(b) == inside


@given(ranges(), st.integers(0, 50))
def test_shift_there_and_back(a: FlatRange, k: int) -> None:
    assert a.shift(k).numel == a.numel and a.shift(k).start == a.start + k
    assert a.shift(k).shift(-k) == a


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6), st.integers(0, 5))
def test_nested_shards_lie_inside_the_inner_shard(
    start: int, inner_size: int, outer_size: int, size: int
) -> None:
    whole = FlatRange(start, start + inner_size * outer_size * size)
    covered = []
    for inner, outer in itertools.product(range(inner_size), range(outer_size)):
        coarse = split_evenly(whole, inner_size, inner)
        fine = split_evenly(coarse, outer_size, outer)
        assert coarse.start <= fine.start and fine.stop <= coarse.stop
        rank = nested_shard_rank(inner, outer, outer_size)
        assert fine == split_evenly(whole, inner_size * outer_size, rank)
        covered += range(fine.start, fine.stop)
    assert covered == list(range(whole.start, whole.stop))


@pytest.mark.parametrize(
    "bad",
    [
        lambda: FlatRange(3, 2),
        lambda: FlatRange(-1, 2),
        lambda: split_evenly(FlatRange(0, 7), 2, 0),
        lambda: split_evenly(FlatRange(0, 8), 2, 2),
        lambda: split_evenly(FlatRange(0, 8), 0, 0),
        lambda: nested_shard_rank(0, 2, 2),
        lambda: flat_range_to_boxes(FlatRange(0, 7), (2, 3)),
    ],
)
def test_bad_ranges_are_refused(bad) -> None:
    with pytest.raises(ValueError):
        bad()


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple), st.data())
def test_boxes_hold_exactly_the_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    part = data.draw(ranges(math.prod(shape)))
    seen_shape = shape or (1,)
    boxes = flat_range_to_boxes(part, shape)
    flat = []
    for offsets, sizes in boxes:
        assert len(offsets) == len(sizes) == len(seen_shape) and min(sizes) >= 1
        axes = [range(o, o + s) for o, s in zip(offsets, sizes, strict=True)]
        flat += [
            sum(x * math.prod(seen_shape[d + 1 :]) for d, x in enumerate(index))
            for index in itertools.product(*axes)
        ]
    assert flat == list(range(part.start, part.stop))
    assert len(boxes) <= 2 * len(seen_shape) - 1


def test_most_boxes_that_a_range_can_need() -> None:
    for dims, most in ((1, 1), (2, 3), (3, 5), (4, 7)):
        shape = (3,) * dims
        assert len(flat_range_to_boxes(FlatRange(1, 3**dims - 1), shape)) == most
