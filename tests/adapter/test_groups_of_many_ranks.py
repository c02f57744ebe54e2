"""Making groups like those that there are exchanges a digest a rank, whatever their sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megatron_fsdp_adapter.sharding.duplicate_groups import digest_of, everyones_groups

WORLD = 16_384


def told_by(monkeypatch: Any, groups: list[tuple[int, ...]]) -> list[Any]:
    """Makes every other rank tell its group of `groups`; returns what this one tells."""
    group_of = {rank: group for group in groups for rank in group}
    digests = {group: digest_of(group) for group in groups}
    told: list[Any] = []

    def gather(everyone: list[Any], own: Any) -> None:
        told.append(own)
        for rank in range(WORLD):
            group = group_of.get(rank)
            everyone[rank] = True if isinstance(own, bool) else digests[group] if group else ""

    monkeypatch.setattr(dist, "get_world_size", lambda: WORLD)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    return told


@pytest.mark.parametrize("size", [512, WORLD])
def test_what_a_rank_tells_does_not_grow_with_its_group(monkeypatch, size):
    groups = [tuple(range(start, start + size)) for start in range(0, WORLD, size)]
    told = told_by(monkeypatch, groups)
    assert everyones_groups("dp_cp_ag", groups[0]) == groups
    assert [len(str(one)) <= 64 for one in told] == [True, True]


def test_ranks_without_a_group_tell_nothing_and_take_part(monkeypatch):
    groups = [tuple(range(8, 16))]
    told = told_by(monkeypatch, groups)
    assert everyones_groups("dp_cp_ag", ()) == groups
    assert told == ["", True]
