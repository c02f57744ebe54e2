"""Groups for all-gathers: made from the ranks of the groups that exist, whatever their order, and
used by gathers alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.parallel_state import RankGenerator
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.megatron.wrapper.process_groups import create_all_gather_groups
from tests.lib.gpt.gpt import STRATEGIES, Case, ddp_config, model_config
from tests.lib.gpt.topologies import (
    TOPOLOGIES,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)
from tests.lib.ranks.groups import everyones, use_groups
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("megatron/wrapper/process_groups.py", "core/duplicate_groups.py")

WORLD = 4
MIRRORED = {"dp_cp_ag": "dp_cp", "expt_dp_ag": "expt_dp"}
LAYOUTS: tuple[tuple[str, dict[str, int]], ...] = (
    # `order` of megatron-core, sizes of the axes
    ("tp-cp-ep-dp-pp", {"tensor_model_parallel_size": 2}),
    ("tp-pp-dp-cp-ep", {"pipeline_model_parallel_size": 2}),
    ("dp-tp-pp-cp-ep", {"tensor_model_parallel_size": 2}),
    ("ep-dp-tp-cp-pp", {"expert_model_parallel_size": 2}),
    ("dp-ep-tp-cp-pp", {"expert_model_parallel_size": 2}),
)


@on_ranks(WORLD)
def test_gather_groups_have_the_members_of_the_groups_they_mirror(rank: int) -> None:
    """Ranks that are computed again, by splitting the world in one fixed order, would be other ones
    in some layouts."""
    for order, sizes in LAYOUTS:
        use_groups(**sizes, order=order)
        collection = create_all_gather_groups(ProcessGroupCollection.use_mpu_process_groups())
        for attribute, mirrored in MIRRORED.items():
            original = getattr(collection, mirrored)
            made = getattr(collection, attribute)
            ranks = dist.get_process_group_ranks(original)
            assert made is not original
            assert everyones(rank, made) == ranks, (order, sizes)
        again = collection.dp_cp_ag
        assert create_all_gather_groups(collection).dp_cp_ag is again


@on_ranks(WORLD)
def test_model_on_a_part_of_the_world(rank: int) -> None:
    """On ranks 2 and 3, in groups from core's generator with an offset. Gradients are the mean of
    inputs of that size."""
    generator = RankGenerator(tp=1, ep=1, dp=2, pp=1, cp=1, order="tp-cp-ep-dp-pp", rank_offset=2)
    [ranks] = generator.get_ranks("dp")
    group = dist.new_group(ranks)
    singles = [dist.new_group([r]) for r in ranks]
    if rank not in ranks:
        assert vars(create_all_gather_groups(SimpleNamespace())) == {}
        return
    groups = SimpleNamespace(dp_cp=group, tp=singles[ranks.index(rank)])
    create_all_gather_groups(groups)
    wrapper = FullyShardedDataParallel(
        model_config(Case()),
        ddp_config(Case(), "optim_grads_params"),
        torch.nn.Linear(64, 8, bias=False),
        pg_collection=groups,
    )
    wrapper(torch.full((1, 64), float(rank))).sum().backward()
    wrapper.finish_grad_sync()
    [param] = wrapper.parameters()
    gather = wrapper.megatron_fsdp_dist_index.get_fsdp_group(independent_all_gather=True)
    assert dist.get_process_group_ranks(gather) == [2, 3]
    assert param.grad._local_tensor.unique().tolist() == [2.5]  # type: ignore[union-attr]


@on_ranks(3)
def test_ranks_that_disagree_are_told_so_on_every_rank(rank: int) -> None:
    pair = dist.new_group([0, 1])
    for group, other in (
        (pair if rank == 0 else None, [0, 1]),
        (dist.group.WORLD if rank < 2 else None, [0, 1, 2]),
    ):
        with pytest.raises(ValueError) as raised:
            create_all_gather_groups(SimpleNamespace(dp_cp=group))
        assert len(set(everyones(str(raised.value)))) == 1
        said = f"dp_cp_ag: rank 0 has a group of ranks {other}, but rank"
        assert said in str(raised.value)


@on_ranks(WORLD)
def test_gathers_of_either_kind_have_a_group_and_change_no_number() -> None:
    """Of dense and expert parameters. Groups are given, or made as Megatron-LM's
    --create-all-gather-group asks for and 0.19 does not. That gathers alone run on them:
    test_launches.py, whose ranks would hang."""
    topology = TOPOLOGIES["ep2"]
    init_topology(topology)
    given = create_all_gather_groups(ProcessGroupCollection.use_mpu_process_groups())
    steps = []
    for ddp, groups in (({}, None), ({}, given), ({"create_all_gather_group": True}, None)):
        trainer = build_topology_trainer(
            topology, case_for(topology), STRATEGIES[3], ddp=ddp, pg_collection=groups
        )
        domains = {group.key.domain: group.domain for group in trainer.chunks[0].engine.groups}
        apart = {kind for kind, d in domains.items() if d.gather_group is not d.reduce_group}
        assert apart == ({"dense", "expert"} if ddp or groups else set())
        steps.append([topology_step(trainer, step).loss for step in range(2)])
    assert steps[0] == steps[1] == steps[2]
