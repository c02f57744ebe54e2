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
    plan_even,
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
    padding = [at for gap in gaps for at in range(gap.start, gap.stop)]
    assert padding == np.flatnonzero(owner == -1).tolist()
    for gap, following in itertools.pairwise(gaps):
        assert gap.numel > 0
        assert gap.stop < following.start


@given(layouts())
def test_ranks_hold_whole_granules_and_together_every_item(layout: GroupLayout) -> None:
    """Rows of it, where granules are; what is scattered to the ranks is gathered again."""
    rng = np.random.default_rng()
    items = [rng.integers(0, 1 << 40, spec.numel) for spec in layout.specs]
    shards = scatter(layout, items)
    for shard in shards:
        assert (shard != -2).all()
    for index, (spec, item) in enumerate(zip(layout.specs, items, strict=True)):
        gathered = np.full(item.shape, -3)
        count = 0
        row = spec.layout_shape[1:] if spec.whole_rows else ()
        holders = layout.holders(index)
        for rank, shard in enumerate(shards):
            piece = layout.shard_range(index, rank)
            where = in_shard(layout, index, rank)
            shape = layout.local_shape(index, rank)
            assert piece.start % spec.granularity == 0
            assert piece.stop % spec.granularity == 0
            assert where.numel == piece.numel
            assert piece.numel == math.prod(shape)
            assert (rank in holders) == (piece.numel > 0)
            assert shape[1:] == row
            gathered[piece.start : piece.stop] = shard[where.start : where.stop]
            count += piece.numel
        assert (gathered == item).all()
        assert count == spec.numel


@given(layouts())
def test_shards_are_equal_and_aligned(layout: GroupLayout) -> None:
    end = 0
    shard_end = 0
    for number, segment in enumerate(layout.segments):
        assert segment.offset == end
        assert segment.shard_offset == shard_end
        assert segment.shard_numel * layout.num_shards == segment.numel
        end = end + segment.numel
        shard_end = shard_end + segment.shard_numel
        for rank in range(layout.num_shards):
            full, shard = layout.segment_shards(rank)[number]
            assert full.numel == segment.shard_numel
            assert shard.numel == segment.shard_numel
            assert full.start == segment.offset + rank * segment.shard_numel
            assert shard.start == segment.shard_offset
            assert full.start % layout.align == 0
            assert shard.start % layout.align == 0
    assert layout.total_numel == end
    assert layout.shard_numel == shard_end
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
    assert layout.placements == again.placements
    assert layout.segments == again.segments


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
        total = 0
        for block in blocks:
            inside = [spec for spec in specs if spec.granularity in block]
            total += lcm_total(inside, num_shards, 16)
        number = len(blocks)
        least[number] = min(total, least.get(number, total))
    most = min(max_segments, len(granularities))
    reachable = [least[number] for number in range(1, most + 1)]
    allowed = 1.01 * layout.item_numel
    if layout.total_numel > allowed:
        assert layout.total_numel <= min(reachable)
        return
    for total in reachable[: len(layout.segments) - 1]:
        assert total > allowed


@given(any_specs(), ALIGNMENTS)
def test_one_shard_is_padded_for_alignment_only(specs: list, align: int) -> None:
    layout = plan_group(specs, 1, align=align)
    assert len(layout.segments) == 1
    aligned = [math.ceil(spec.numel / align) * align for spec in specs]
    assert layout.total_numel == sum(aligned)


PAGE = Path(__file__).parents[3] / "docs" / "contributing" / "layout.md"
DOCUMENTED = PAGE.read_text().splitlines()


@pytest.mark.parametrize("num_shards", TABLE_SHARDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_padding_of_published_models(name: str, num_shards: int) -> None:
    """It is what docs/contributing/layout.md says."""
    specs = specs_of(PUBLISHED[name])
    layout = plan_group(specs, num_shards)
    packed = lcm_total(specs, num_shards, layout.align)
    lcm = f"{packed / layout.item_numel - 1:.2%}"
    ours = f"{layout.total_numel / layout.item_numel - 1:.2%}"
    begin = f"| {name} | {num_shards} |"
    [row] = [line for line in DOCUMENTED if line.startswith(begin)]
    assert re.search(rf"\| {lcm} \|.*\| {ours} \| {len(layout.segments)} \|$", row)


LLAMA = [specs_of(LLAMA3_405B_LAYER) for _ in range(126)]
for shape in ((128256, 16384), (16384,), (128256, 16384)):
    LLAMA.append(specs_of([shape]))
VARIED = specs_of([(64 + k, 16 * (k + 1)) for k in range(60)])
FAST = {
    "Llama 3 405B": (LLAMA, 16384, 2.0),
    "60 granularities": ([VARIED], 64, 5.0),
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


EXAMPLES: dict[str, tuple[list[ParamSpec], int, int, list[list[int]]]] = {}
"""Specs, shards, elements of a shard, and how many elements of each item the ranks hold."""
EXAMPLES["a group smaller than the aligned shards"] = (
    specs_of([(4096,)]),
    512,
    16,
    [[16] * 256 + [0] * 256],
)
WHOLE = [(40, 80), (96, 100), (70, 100), (50, 64), (33,)]
EXAMPLES["whole tensors share shards as long as the largest"] = (
    specs_of(WHOLE, [3200, 9600, 7000, 3200, 1]),
    3,
    9600,
    [[0, 0, 3200], [0, 9600, 0], [7000, 0, 0], [0, 0, 3200]],
)
EXAMPLES["blocks of rows stay together"] = (
    specs_of([(24, 10)], [8 * 10]),
    4,
    80,
    [[80, 80, 80, 0]],
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_ranks_hold_of_an_example(name: str) -> None:
    specs, num_shards, shard_numel, held = EXAMPLES[name]
    layout = plan_group(specs, num_shards, max_segments=1)
    assert layout.shard_numel == shard_numel
    assert len(layout.segments) == 1
    for index, expected in enumerate(held):
        numels = [layout.shard_range(index, rank).numel for rank in range(num_shards)]
        assert numels == expected


SHAPES = ((5, 3), (1, 7), (8, 4), (2,), (), (3, 2, 2))


@pytest.mark.parametrize("num_shards", (1, 2, 3, 4, 7))
def test_even_rows_are_those_of_torch_chunk(num_shards: int) -> None:
    specs = []
    for index, shape in enumerate(SHAPES):
        granularity = math.prod(shape[1:])
        specs.append(spec(shape, index=index, fqns=(f"p{index}",), granularity=granularity))
    layout = plan_even(specs, num_shards)
    assert layout.has_even_rows
    assert layout.with_shards(1).total_numel == layout.total_numel
    for index, shape in enumerate(SHAPES):
        whole = torch.arange(math.prod(shape)).view(shape or (1,))
        parts = [part.numel() for part in torch.chunk(whole, num_shards)]
        parts += [0] * (num_shards - len(parts))
        held = [layout.shard_range(index, rank).numel for rank in range(num_shards)]
        assert held == parts
        assert layout.placements[index].offset % (num_shards * layout.align) == 0 or num_shards == 1
    covered = sum(segment.numel for segment in layout.segments) + layout.tail
    gaps = sum(gap.numel for gap in layout.gaps())
    assert covered <= layout.total_numel == layout.item_numel + gaps


def test_even_rows_that_would_cut_granules_are_packed() -> None:
    blocks = spec((96, 8), granularity=32 * 8)
    assert not plan_even([blocks], 2).has_even_rows
    assert plan_even([blocks], 3).has_even_rows


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


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = []
"""What is made, by which arguments that are unlike good ones, and what the error says."""


def wrong(make: Callable[..., Any], named: str, **changes: Any) -> None:
    WRONG.append((make, changes, named))


wrong(spec, "w|parameter", fqns=())
wrong(spec, "w|parameter", index=-1)
wrong(spec, "w|parameter", shape=(0, 8))
wrong(spec, "w|parameter", granularity=5)
wrong(spec, "w|parameter", granularity=0)

wrong(plan, "num_shards=0", num_shards=0)
wrong(plan, "align=0", align=0)
wrong(plan, "max_segments=0", max_segments=0)
wrong(plan, "padding_bound=-0.1", padding_bound=-0.1)
wrong(plan, "specs is empty", specs=[])
wrong(plan, "index 3", specs=[spec(index=3)])
wrong(plan, "one dtype", specs=[spec(), spec(index=1, dtype=torch.bfloat16)])
wrong(plan, "one requires_grad", specs=[spec(), spec(index=1, requires_grad=False)])

wrong(hand_made, "2 specs and 1 placements", placements=(Placement(0, 0),))
wrong(hand_made, "overlap", placements=(Placement(0, 0), Placement(0, 24)))
wrong(hand_made, "not inside", placements=(Placement(0, 0), Placement(0, 40)))
wrong(hand_made, "not inside", placements=(Placement(0, 0), Placement(0, 33)), align=1)
wrong(hand_made, "segment 1 does not exist", placements=(Placement(0, 0), Placement(1, 32)))
wrong(hand_made, "must start behind 64", segments=(Segment(0, 64, 8, 2), Segment(32, 64, 8, 2)))
wrong(hand_made, "tail=-1", tail=-1)
wrong(hand_made, "tail=1: 65 elements", tail=1)
wrong(hand_made, "with 2 shards", segments=(Segment(0, 64, 8, 4),))
wrong(
    hand_made,
    "shards of .* are not aligned to 64",
    align=64,
    segments=(Segment(0, 64, 8, 2), Segment(64, 64, 8, 2)),
)
wrong(hand_made, "index 5, but position 1", specs=(spec(), spec(index=5)))
wrong(
    hand_made,
    "cuts a granule",
    specs=(spec((6, 8), granularity=24), spec((2, 8), index=1)),
    placements=(Placement(0, 16), Placement(0, 0)),
)


def four_joined_to(number: int) -> GroupLayout:
    return plan(num_shards=4).with_shards(number)


for number in (0, -1, 3, 5, 8):
    wrong(four_joined_to, f"4 shards do not make {number} larger ones", number=number)

wrong(FlatRange, "not a range", start=3, stop=2)
wrong(FlatRange, "not a range", start=-1, stop=2)
wrong(split_evenly, "parts", whole=FlatRange(0, 7), num_parts=2, part=0)
wrong(split_evenly, "parts", whole=FlatRange(0, 8), num_parts=2, part=2)
wrong(split_evenly, "parts", whole=FlatRange(0, 8), num_parts=0, part=0)
wrong(nested_shard_rank, "of 2 do not exist", inner_rank=0, outer_rank=2, outer_size=2)
wrong(flat_range_to_boxes, "", part=FlatRange(0, 7), shape=(2, 3))
wrong(Segment, ".", offset=0, numel=64, granularity=24, num_shards=2)
wrong(Segment, ".", offset=0, numel=64, granularity=8, num_shards=0)
wrong(Segment, ".", offset=1, numel=64, granularity=8, num_shards=2)
wrong(Segment, ".", offset=0, numel=0, granularity=1, num_shards=1)


@pytest.mark.parametrize(("make", "changes", "named"), WRONG)
def test_what_is_impossible_is_refused(make, changes, named) -> None:
    with pytest.raises(ValueError, match=named):
        make(**changes)


def test_what_differs_from_them_is_possible() -> None:
    assert plan().num_shards == hand_made().num_shards == 2
