"""Muon's plan: matrices of fused weights, their owners, and what travels."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.layout import plan_group
from megatron_fsdp_adapter.optim.muon.matrices import Member, MuonParam, Run, row_blocks
from megatron_fsdp_adapter.optim.muon.plan import assign, plan_stage, sent_before, stages_of
from tests.lib.layout.layout_cases import specs_of

CHECKS = ("optim/muon/plan.py", "optim/muon/matrices.py")

# Owners.


@given(st.lists(st.integers(0, 10**6), max_size=60), st.integers(1, 40))
def test_no_rank_has_more_than_the_mean_and_one_matrix(costs: list[int], ranks: int) -> None:
    found = assign(costs, ranks)
    assert len(found) == len(costs)
    assert all(0 <= owner < ranks for owner in found)
    assert found == assign(costs, ranks)
    loads = [0] * ranks
    for cost, owner in zip(costs, found, strict=True):
        loads[owner] += cost
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0)


def test_what_is_costly_in_a_unit_lies_on_different_ranks() -> None:
    """Of units with one large and one smaller matrix, each rank has one of each unit."""
    found = assign([9, 5] * 4, 2)
    assert all(one != other for one, other in zip(found[::2], found[1::2], strict=True))


# Matrices.


@pytest.mark.parametrize(("rows", "heights"), [(7, (2, 1, 1)), (4, ()), (4, (4, 0))])
def test_heights_that_do_not_make_the_rows_are_refused(rows: int, heights: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"parts of .* rows do not make"):
        row_blocks(rows, heights)


# Stages.


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 80))
def test_stages_are_neighbors_within_the_limit(numels: list[int], limit: int) -> None:
    found = stages_of(numels, limit)
    assert [n for part in found for n in numels[part]] == numels
    for number, part in enumerate(found):
        count = part.stop - part.start
        total = sum(numels[part])
        assert count >= 1
        assert total <= limit or count == 1
        if number + 1 < len(found):
            after = found[number + 1]
            assert total + numels[after.start] > limit, "it would have fitted"


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_rows_travel_ahead_within_the_limit(sizes: list[int], limit: int) -> None:
    found = sent_before(sizes, limit)
    for number, sent in enumerate(found):
        assert number < sent <= len(sizes)
        assert number == 0 or sent >= found[number - 1]
        flight = sum(sizes[number:sent])
        assert flight <= limit or sent == number + 1
        assert sent == len(sizes) or flight + sizes[sent] > limit, "it would have fitted"


# What travels, with tensors in the place of ranks.


@st.composite
def stages(draw: st.DrawFn) -> tuple[list[MuonParam], tuple[Member, ...], list[list[int]]]:
    """Parameters with any heights, cut by tensor-parallel ranks and into shards, or not."""
    parts = draw(st.integers(1, 3))
    shards = draw(st.integers(1, 4))
    copies = draw(st.integers(1, 2))
    parts_of_rows = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    splits = st.sampled_from([None, 0, 1])
    weight = st.tuples(parts_of_rows, st.integers(1, 3), st.integers(1, 9), splits)
    fused = draw(st.lists(weight, min_size=1, max_size=4))
    shapes = [(sum(heights) * times, columns) for heights, times, columns, _ in fused]
    layout = plan_group(specs_of(shapes), shards)
    params = []
    for index, (heights, _, _, split) in enumerate(fused):
        if len(heights) == 1:
            rows, _ = shapes[index]
            heights = [rows * parts if split == 0 else rows]
        params.append(MuonParam(layout, index, split, parts, tuple(heights)))
    members = tuple(itertools.product(range(shards), range(parts))) * copies
    ranks = st.integers(0, len(members) - 1)
    return params, members, [[draw(ranks) for _ in param.shapes] for param in params]


def whole_of(param: MuonParam) -> torch.Tensor:
    """Every element its own number."""
    columns = param.columns * param.panels
    return torch.arange(param.rows * columns).view(param.rows, columns)


def pinned_by(param: MuonParam, member: Member, whole: torch.Tensor) -> torch.Tensor:
    """The member's rows of the parameter, flat: its part, and of that its shard."""
    if param.split is not None:
        whole = whole.chunk(param.parts, param.split)[member[1]]
    held = param.layout.shard_range(param.index, member[0])
    return whole.reshape(-1)[held.start : held.stop]


def put(rows: torch.Tensor, start: int, values: torch.Tensor) -> None:
    target = rows[start : start + len(values)]
    assert (target == -1).all(), "an element came twice"
    target.copy_(values)


def piece(run: Run) -> tuple[int, int, int, int, int]:
    return run.param, run.matrix, run.panel, run.at, run.local.numel


@settings(max_examples=150, deadline=None)
@given(stages())
def test_matrices_arrive_whole_and_every_holder_gets_their_updates(
    case: tuple[list[MuonParam], tuple[Member, ...], list[list[int]]],
) -> None:
    params, members, of = case
    plans = [plan_stage(params, of, members, me) for me in range(len(members))]
    wholes = [whole_of(param) for param in params]
    panels = {}
    for number, param in enumerate(params):
        for matrix, (rows, _) in enumerate(param.shapes):
            for panel in range(param.panels):
                panels[number, matrix, panel] = torch.full((rows * param.columns,), -1)

    for me, plan in enumerate(plans):
        for source, runs in enumerate(plan.received):
            for sent, got in zip(plans[source].sent[me], runs, strict=True):
                assert piece(sent) == piece(got)
                rows = pinned_by(params[sent.param], members[source], wholes[sent.param])
                panel = panels[got.param, got.matrix, got.panel]
                put(panel, got.at, rows[sent.local.start : sent.local.stop])

    for number, param in enumerate(params):
        assert len(param.blocks) == len(param.shapes)
        for matrix, blocks in enumerate(param.blocks):
            rows = torch.cat([wholes[number][start:stop] for start, stop in blocks])
            beside = []
            for panel in range(param.panels):
                beside.append(panels[number, matrix, panel].view(len(rows), -1))
            assert torch.equal(torch.cat(beside, 1), rows)

    for me, plan in enumerate(plans):
        held = []
        for param, whole in zip(params, wholes, strict=True):
            held.append(pinned_by(param, members[me], whole))
        own = [torch.full_like(rows, -1) for rows in held]
        for owner, runs in enumerate(plan.updates):
            for sent, got in zip(plans[owner].returned[me], runs, strict=True):
                assert piece(sent) == piece(got)
                values = panels[got.param, got.matrix, got.panel][got.at :]
                put(own[got.param], got.local.start, values[: got.local.numel])
        for found, expected in zip(own, held, strict=True):
            assert torch.equal(found, expected)
