"""Process groups: which the wrapper takes, makes and refuses, and what it leaves alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_fsdp_adapter.core.duplicate_groups import digest_of, everyones_groups
from megatron_fsdp_adapter.core.topology import DENSE
from megatron_fsdp_adapter.megatron.wrapper.domains import SHARED_EMBEDDING, domain_name
from megatron_fsdp_adapter.megatron.wrapper.problems import (
    CHECKED,
    group_problems,
    group_ranks,
    model_problems,
)
from tests.lib.gpt.gpt import STRATEGIES
from tests.lib.gpt.one_layer import CASE, wrapped

CHECKS = (
    "megatron/wrapper/process_groups.py",
    "megatron/wrapper/domains.py",
    "megatron/wrapper/problems.py",
    "core/duplicate_groups.py",
)

GRID = {  # of rank 0 in eight ranks
    "tp": (0, 1), "cp": (0, 2), "pp": (0, 4), "dp_cp": (0, 2),
    "expt_tp": (0,), "ep": (0, 1), "expt_dp": (0, 2),
}  # fmt: skip


SIZES = {
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2,
    "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
}  # fmt: skip
"""Those of `GRID`."""


def problems(num_moe_experts: int | None = 4, **ranks: tuple[int, ...]) -> str:
    config = SimpleNamespace(**SIZES, num_moe_experts=num_moe_experts)
    return "\n".join(group_problems(config, {**GRID, **ranks}))


@pytest.mark.parametrize(
    ("changes", "says"),
    (
        ({}, None),
        ({"num_moe_experts": None}, None),
        ({"num_moe_experts": None, "expt_dp": (0, 2, 6), "expt_tp": (0, 1)}, None),
        (
            {"tp": (0, 1, 2, 3)},
            "tensor_model_parallel_size=2, but the tp process group has 4 ranks [0, 1, 2, 3]",
        ),
        (
            {"expt_tp": (0, 1)},
            "expert_tensor_parallel_size=1, but the expt_tp process group has 2 ranks [0, 1]",
        ),
        ({"tp": (0, 2)}, "tp=[0, 2] and dp_cp=[0, 2] share ranks [0, 2], expected [0]"),
        ({"pp": (0, 1)}, "tp=[0, 1] and pp=[0, 1] share ranks [0, 1], expected [0]"),
        ({"ep": (0, 2)}, "ep=[0, 2] and expt_dp=[0, 2] share ranks [0, 2], expected [0]"),
        ({"cp": (0, 3)}, "dp_cp=[0, 2] lacks the ranks [3] of cp=[0, 3]"),
        ({"expt_dp": (0, 2, 6)}, "tp x dp_cp has 4 ranks, but"),
    ),
)
def test_groups_of_no_grid_are_told(
    one_rank: torch.device, changes: dict[str, Any], says: str | None
) -> None:
    """Those of experts do not matter without experts."""
    found = problems(**changes)
    if says is None:
        assert found == ""
    else:
        assert says in found


@pytest.mark.parametrize(("sizes", "marked"), [((2, 1), True), ((2, 1), False), ((2, 2), True)])
def test_experts_that_core_marks_as_dense_are_refused(sizes: tuple[int, int], marked: bool) -> None:
    """Up to 0.18 it does so with one expert-parallel rank, under stock DDP too: tensor-parallel
    ranks get other gradients for the same weights."""
    config = SimpleNamespace(
        num_moe_experts=2,
        expert_model_parallel_size=1,
        tensor_model_parallel_size=sizes[0],
        expert_tensor_parallel_size=sizes[1],
    )
    experts = nn.ModuleList([nn.Linear(2, 2)])
    model = nn.ModuleDict({"experts": experts, "shared_experts": nn.Linear(2, 2)})
    for param in model.parameters():
        param.allreduce = True  # type: ignore[attr-defined]
    for param in model["experts"].parameters():
        param.allreduce = marked  # type: ignore[attr-defined]
    found = model_problems(model, config, SimpleNamespace())
    if sizes[0] == sizes[1] or not marked:
        assert found == []
    else:
        assert len(found) == 1
        assert "has marked experts.0.weight (and 1 more) as dense" in found[0]


def test_groups_of_parallel_state_are_read(one_rank: torch.device) -> None:
    ranks = group_ranks(None)
    assert ranks == dict.fromkeys(CHECKED, (0,))


# What is left alone.


def test_wrapping_draws_no_random_numbers(one_rank: torch.device) -> None:
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    states: list[dict[str, torch.Tensor]] = []

    def note(model: Any) -> None:
        tracked = tensor_parallel.get_cuda_rng_tracker().states_.items()
        states.append({"": torch.get_rng_state(), **{k: v.clone() for k, v in tracked}})

    note(wrapped(change=note))
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_embedding_shared_across_stages_has_a_buffer_of_its_own(one_rank: torch.device) -> None:
    """Its shards must be those of the other stage, whatever else is in the unit."""

    def change(model: Any) -> None:
        model.embedding.word_embeddings.weight.shared_embedding = True

    wrapper = wrapped(case=CASE.but(positions="learned_absolute"), change=change)
    alone = [g for g in wrapper.engine.groups if g.key.domain == SHARED_EMBEDDING]
    assert [len(group.params) for group in alone] == [1]
    unit = next(unit for unit in wrapper.engine.units if alone[0] in unit.groups)
    assert unit.name == "embedding"
    assert len(unit.groups) == 2


def test_kind_goes_by_the_mark_and_by_the_name_only_without_it() -> None:
    param = nn.Parameter(torch.zeros(1))
    assert domain_name(param, "mlp.experts.linear_fc1.weight") == "expert"
    param.allreduce = True
    assert domain_name(param, "mlp.experts.linear_fc1.weight") == "dense"
    param.allreduce = False
    assert domain_name(param, "mlp.linear_fc1.weight") == "expert"


# What Megatron sets on process groups (SHARP, NCCL configurations, streams of high priority)
# holds for the wrapper: it communicates on Megatron's own groups and makes no others unless
# asked.


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("passed", [True, False])
def test_gathers_and_reductions_run_on_the_groups_of_megatron(
    one_rank: torch.device, strategy: str, passed: bool
) -> None:
    collection = None
    if passed:
        collection = ProcessGroupCollection.use_mpu_process_groups()
    with mock.patch.object(dist, "new_group") as makes:
        wrapper = wrapped(strategy, pg_collection=collection)
    makes.assert_not_called()
    domain = wrapper.megatron_fsdp_dist_index.domain(DENSE)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert domain.gather_group is group
    assert domain.reduce_group is group


def test_a_group_is_made_where_one_is_asked_for(one_rank: torch.device) -> None:
    wrapper = wrapped(ddp={"create_all_gather_group": True})
    domain = wrapper.megatron_fsdp_dist_index.domain(DENSE)
    assert domain.gather_group not in (domain.reduce_group, dist.group.WORLD)


# Making groups like those that there are exchanges a digest a rank, whatever their sizes.


MANY = 2_048


def told_by(monkeypatch: Any, groups: list[tuple[int, ...]]) -> list[Any]:
    """Makes every other rank tell its group of `groups`; returns what this one tells."""
    group_of = {rank: group for group in groups for rank in group}
    digests = {group: digest_of(group) for group in groups}
    told: list[Any] = []

    def gather(everyone: list[Any], own: Any) -> None:
        told.append(own)
        for rank in range(MANY):
            if isinstance(own, bool):
                everyone[rank] = True
            elif rank in group_of:
                everyone[rank] = digests[group_of[rank]]
            else:
                everyone[rank] = ""

    monkeypatch.setattr(dist, "get_world_size", lambda: MANY)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    return told


@pytest.mark.parametrize("size", [64, MANY])
def test_what_a_rank_tells_does_not_grow_with_its_group(monkeypatch, size):
    groups = [tuple(range(start, start + size)) for start in range(0, MANY, size)]
    told = told_by(monkeypatch, groups)
    assert everyones_groups("dp_cp_ag", groups[0]) == groups
    assert len(told) == 2
    for one in told:
        assert len(str(one)) <= 64


def test_ranks_without_a_group_tell_nothing_and_take_part(monkeypatch):
    groups = [tuple(range(8, 16))]
    told = told_by(monkeypatch, groups)
    assert everyones_groups("dp_cp_ag", ()) == groups
    assert told == ["", True]
