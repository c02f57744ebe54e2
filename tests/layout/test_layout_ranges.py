"""Ranges and the blocks that a flat range is in a tensor's own axes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.layout import (
    FlatRange,
    flat_range_to_boxes,
    nested_shard_rank,
    split_evenly,
)


@st.composite
def ranges(draw: st.DrawFn, stop: int = 60) -> FlatRange:
    first, last = sorted((draw(st.integers(0, stop)), draw(st.integers(0, stop))))
    return FlatRange(first, last)


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
