"""Properties of planned layouts over random groups, shard counts and alignments."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.layout import (
    FlatRange,
    GroupLayout,
    ParamSpec,
    Placement,
    Segment,
    flat_range_to_boxes,
    nested_shard_rank,
    plan_group,
    split_evenly,
)
from tests.lib.layout.layout_cases import (
    ALIGNMENTS,
    LLAMA3_405B_LAYER,
    PUBLISHED,
    SHARDS,
    TABLE_SHARDS,
    any_specs,
    in_shard,
    layouts,
    lcm_total,
    row_specs,
    scatter,
    specs_of,
)

CHECKS = ("core/layout/planner.py", "core/layout/group.py", "core/layout/ranges.py")


@given(layouts())
def test_items_are_disjoint_and_inside_their_segment(layout: GroupLayout) -> None:
    owner = np.full(layout.total_numel, -1)
    for index, placement in enumerate(layout.placements):
        extent = layout.item_range(index)
        segment = layout.segments[placement.segment]
        assert extent.numel == layout.specs[index].numel
        assert segment.offset <= extent.start
        assert extent.stop <= segment.offset + segment.numel
        assert (owner[extent.start : extent.stop] == -1).all()
        owner[extent.start : extent.stop] = index
    gaps = layout.gaps()
    padding = np.concatenate([np.arange(gap.start, gap.stop) for gap in gaps] or [[]])
    assert padding.tolist() == np.flatnonzero(owner == -1).tolist()
    assert all(a.numel > 0 and a.stop < b.start for a, b in itertools.pairwise(gaps))


@given(layouts())
def test_ranks_hold_whole_granules_and_together_every_item(layout: GroupLayout) -> None:
    """Rows of it, where granules are; what is scattered to the ranks is gathered again."""
    rng = np.random.default_rng()
    items = [rng.integers(0, 1 << 40, spec.numel) for spec in layout.specs]
    shards = scatter(layout, items)
    assert all((shard != -2).all() for shard in shards)
    for index, (spec, item) in enumerate(zip(layout.specs, items, strict=True)):
        gathered = np.full(item.shape, -3)
        count = 0
        for rank, shard in enumerate(shards):
            piece = layout.shard_range(index, rank)
            where = in_shard(layout, index, rank)
            shape = layout.local_shape(index, rank)
            assert piece.start % spec.granularity == piece.stop % spec.granularity == 0
            assert where.numel == piece.numel == math.prod(shape)
            assert (rank in layout.holders(index)) == (piece.numel > 0)
            assert shape[1:] == (spec.layout_shape[1:] if spec.whole_rows else ())
            gathered[piece.start : piece.stop] = shard[where.start : where.stop]
            count += piece.numel
        assert (gathered == item).all() and count == spec.numel


@given(layouts())
def test_shards_are_equal_and_aligned(layout: GroupLayout) -> None:
    end = 0
    shard_end = 0
    for number, segment in enumerate(layout.segments):
        assert (segment.offset, segment.shard_offset) == (end, shard_end)
        assert segment.shard_numel * layout.num_shards == segment.numel
        end = end + segment.numel
        shard_end = shard_end + segment.shard_numel
        for rank in range(layout.num_shards):
            full, shard = layout.segment_shards(rank)[number]
            assert full.numel == shard.numel == segment.shard_numel
            assert full.start == segment.offset + rank * segment.shard_numel
            assert shard.start == segment.shard_offset
            assert full.start % layout.align == shard.start % layout.align == 0
    assert (layout.total_numel, layout.shard_numel) == (end, shard_end)
    for index in range(len(layout.specs)):
        assert layout.item_range(index).start % layout.align == 0
        for rank in range(layout.num_shards):
            assert in_shard(layout, index, rank).start % layout.align == 0


@given(any_specs(), SHARDS, ALIGNMENTS)
def test_equal_input_gives_an_equal_layout(specs: list, num_shards: int, align: int) -> None:
    layout = plan_group(specs, num_shards, align=align)
    renamed = [replace(spec, fqns=(f"other.{spec.index}",)) for spec in specs]
    again = plan_group(renamed, num_shards, align=align)
    assert layout == plan_group(list(specs), num_shards, align=align)
    assert layout.placements == again.placements and layout.segments == again.segments


@given(any_specs(), SHARDS, ALIGNMENTS, st.integers(1, 4))
def test_never_more_padding_than_lcm_packing(
    specs: list, num_shards: int, align: int, max_segments: int
) -> None:
    layout = plan_group(specs, num_shards, align=align, max_segments=max_segments)
    assert layout.total_numel <= lcm_total(specs, num_shards, align)
    assert len(layout.segments) <= max_segments


def set_partitions(values: list[int]) -> Iterator[list[list[int]]]:
    if not values:
        yield []
        return
    for partial in set_partitions(values[1:]):
        yield [[values[0]], *partial]
        for k, block in enumerate(partial):
            yield [*partial[:k], [values[0], *block], *partial[k + 1 :]]


@given(row_specs(), st.integers(2, 64), st.integers(1, 4))
@example(specs_of(PUBLISHED["DeepSeek-V3 dense layer"]), 512, 4)
@example(specs_of(PUBLISHED["small layer with biases, h=2880"]), 64, 4)
def test_fewest_segments_within_the_bound(specs: list, num_shards: int, max_segments: int) -> None:
    """Against every partition of the granularities, each block packed by LCM in input order."""
    layout = plan_group(specs, num_shards, max_segments=max_segments, padding_bound=0.01)
    granularities = sorted({spec.granularity for spec in specs})
    if len(granularities) > 6:
        return
    least: dict[int, int] = {}
    for blocks in set_partitions(granularities):
        total = sum(
            lcm_total([s for s in specs if s.granularity in block], num_shards, 16)
            for block in blocks
        )
        least[len(blocks)] = min(total, least.get(len(blocks), total))
    reachable = [least[k] for k in range(1, min(max_segments, len(granularities)) + 1)]
    allowed = 1.01 * layout.item_numel
    if layout.total_numel <= allowed:
        assert all(total > allowed for total in reachable[: len(layout.segments) - 1])
    else:
        assert layout.total_numel <= min(reachable)


@given(any_specs(), ALIGNMENTS)
def test_one_shard_is_padded_for_alignment_only(specs: list, align: int) -> None:
    layout = plan_group(specs, 1, align=align)
    assert len(layout.segments) == 1
    assert layout.total_numel == sum(math.ceil(spec.numel / align) * align for spec in specs)


DOCUMENTED = (Path(__file__).parents[3] / "docs" / "layout.md").read_text().splitlines()


@pytest.mark.parametrize("num_shards", TABLE_SHARDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_padding_of_published_models(name: str, num_shards: int) -> None:
    """It is what docs/layout.md says."""
    specs = specs_of(PUBLISHED[name])
    layout = plan_group(specs, num_shards)
    totals = lcm_total(specs, num_shards, layout.align), layout.total_numel
    lcm, ours = (f"{total / layout.item_numel - 1:.2%}" for total in totals)
    [row] = [line for line in DOCUMENTED if line.startswith(f"| {name} | {num_shards} |")]
    assert re.search(rf"\| {lcm} \|.*\| {ours} \| {len(layout.segments)} \|$", row)


FAST: dict[str, tuple[list[list[ParamSpec]], int, float]] = {
    "Llama 3 405B": (
        [specs_of(LLAMA3_405B_LAYER) for _ in range(126)]
        + [specs_of([shape]) for shape in ((128256, 16384), (16384,), (128256, 16384))],
        16384,
        2.0,
    ),
    "60 granularities": ([specs_of([(64 + k, 16 * (k + 1)) for k in range(60)])], 64, 5.0),
}
"""Groups, shards, and seconds in which they are planned."""


@pytest.mark.parametrize("name", FAST)
def test_large_models_are_planned_fast(name: str) -> None:
    groups, num_shards, seconds = FAST[name]
    start = time.process_time()
    planned = [plan_group(specs, num_shards) for specs in groups]
    assert time.process_time() - start < seconds
    for specs, layout in zip(groups, planned, strict=True):
        assert layout.total_numel <= lcm_total(specs, num_shards, layout.align)


WHOLE = [(40, 80), (96, 100), (70, 100), (50, 64), (33,)]
EXAMPLES: dict[str, tuple[list[ParamSpec], int, int, list[list[int]]]] = {
    "a group smaller than the aligned shards": (
        specs_of([(4096,)]), 512, 16, [[16] * 256 + [0] * 256],
    ),
    "whole tensors share shards as long as the largest": (
        specs_of(WHOLE, [*map(math.prod, WHOLE[:-1]), 1]), 3, 9600,
        [[0, 0, 3200], [0, 9600, 0], [7000, 0, 0], [0, 0, 3200]],
    ),
    "blocks of rows stay together": (specs_of([(24, 10)], [8 * 10]), 4, 80, [[80, 80, 80, 0]]),
}  # fmt: skip
"""Specs, shards, elements of a shard, and how many elements of each item the ranks hold."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_ranks_hold_of_an_example(name: str) -> None:
    specs, num_shards, shard_numel, held = EXAMPLES[name]
    layout = plan_group(specs, num_shards, max_segments=1)
    assert layout.shard_numel == shard_numel and len(layout.segments) == 1
    for index, expected in enumerate(held):
        numels = [layout.shard_range(index, rank).numel for rank in range(num_shards)]
        assert numels == expected


def spec(shape: tuple[int, ...] = (4, 8), **changes) -> ParamSpec:
    values = {"index": 0, "fqns": ("w",), "dtype": torch.float32, "requires_grad": True}
    values |= {"shape": shape, "granularity": 8}
    return ParamSpec(**(values | changes))


def plan(**changes) -> GroupLayout:
    return plan_group(**({"specs": [spec()], "num_shards": 2} | changes))


def hand_made(**changes) -> GroupLayout:
    values = {
        "specs": (spec(), spec(index=1)),
        "segments": (Segment(0, 64, 8, 2),),
        "placements": (Placement(0, 0), Placement(0, 32)),
        "num_shards": 2,
        "align": 8,
    }
    return GroupLayout(**(values | changes))


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *(
        (spec, changes, r"w|parameter")
        for changes in (
            {"fqns": ()},
            {"index": -1},
            {"shape": (0, 8)},
            {"granularity": 5},
            {"granularity": 0},
        )
    ),
    (plan, {"num_shards": 0}, "num_shards=0"),
    (plan, {"align": 0}, "align=0"),
    (plan, {"max_segments": 0}, "max_segments=0"),
    (plan, {"padding_bound": -0.1}, "padding_bound=-0.1"),
    (plan, {"specs": []}, "specs is empty"),
    (plan, {"specs": [spec(index=3)]}, "index 3"),
    (plan, {"specs": [spec(), spec(index=1, dtype=torch.bfloat16)]}, "one dtype"),
    (plan, {"specs": [spec(), spec(index=1, requires_grad=False)]}, "one requires_grad"),
    (hand_made, {"placements": (Placement(0, 0),)}, "2 specs and 1 placements"),
    (hand_made, {"placements": (Placement(0, 0), Placement(0, 24))}, "overlap"),
    (hand_made, {"placements": (Placement(0, 0), Placement(0, 40))}, "not inside"),
    (hand_made, {"placements": (Placement(0, 0), Placement(0, 33)), "align": 1}, "not inside"),
    (hand_made, {"placements": (Placement(0, 0), Placement(1, 32))}, "segment 1 does not exist"),
    (hand_made, {"segments": (Segment(8, 64, 8, 2),)}, "must start at 0"),
    (hand_made, {"segments": (Segment(0, 64, 8, 4),)}, "with 2 shards"),
    (hand_made, {"align": 64}, "shards of .* are not aligned to 64"),
    (hand_made, {"specs": (spec(), spec(index=5))}, "index 5, but position 1"),
    (
        hand_made,
        {
            "specs": (spec((6, 8), granularity=24), spec((2, 8), index=1)),
            "placements": (Placement(0, 16), Placement(0, 0)),
        },
        "cuts a granule",
    ),
    *(
        (
            lambda number: plan(num_shards=4).with_shards(number),
            {"number": number},
            f"4 shards do not make {number} larger ones",
        )
        for number in (0, -1, 3, 5, 8)
    ),
    *((FlatRange, {"start": start, "stop": 2}, "not a range") for start in (3, -1)),
    *(
        (split_evenly, {"whole": FlatRange(0, numel), "num_parts": parts, "part": part}, "parts")
        for numel, parts, part in ((7, 2, 0), (8, 2, 2), (8, 0, 0))
    ),
    (nested_shard_rank, {"inner_rank": 0, "outer_rank": 2, "outer_size": 2}, "of 2 do not exist"),
    (flat_range_to_boxes, {"part": FlatRange(0, 7), "shape": (2, 3)}, ""),
    *(
        (
            Segment,
            dict(zip(("offset", "numel", "granularity", "num_shards"), bad, strict=True)),
            ".",
        )
        for bad in ((0, 64, 24, 2), (0, 64, 8, 0), (1, 64, 8, 2), (0, 0, 1, 1))
    ),
]
"""What is made, by which arguments that are unlike good ones, and what the error says."""


@pytest.mark.parametrize(("make", "changes", "named"), WRONG)
def test_what_is_impossible_is_refused(make, changes, named) -> None:
    with pytest.raises(ValueError, match=named):
        make(**changes)


def test_what_differs_from_them_is_possible() -> None:
    assert plan().num_shards == hand_made().num_shards == 2
