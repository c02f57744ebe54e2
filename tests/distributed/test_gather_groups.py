"""Groups for all-gathers: made from the ranks of the groups that exist, whatever their order, and
used by gathers alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.parallel_state import RankGenerator
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.core.runtime.comm import Communicator
from megatron_fsdp_adapter.megatron.process_groups import create_all_gather_groups
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    ddp_config,
    model_config,
)
from tests.distributed.groups import everyones, use_groups
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.topologies import (
    TOPOLOGIES,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)

WORLD = 4
MIRRORED = {"dp_cp_ag": "dp_cp", "expt_dp_ag": "expt_dp"}
LAYOUTS: tuple[tuple[str, dict[str, int]], ...] = (
    # `order` of megatron-core, sizes of the axes
    ("tp-cp-ep-dp-pp", {"tensor": 2}),
    ("tp-pp-dp-cp-ep", {"pipeline": 2}),
    ("dp-tp-pp-cp-ep", {"tensor": 2}),
    ("ep-dp-tp-cp-pp", {"expert": 2}),
    ("dp-ep-tp-cp-pp", {"expert": 2}),
)


def _init(order: str, sizes: dict[str, int]) -> ProcessGroupCollection:
    names = {"tensor": "tensor_model", "pipeline": "pipeline_model", "expert": "expert_model"}
    options = {f"{names.get(name, name)}_parallel_size": size for name, size in sizes.items()}
    use_groups(**options, order=order)
    return ProcessGroupCollection.use_mpu_process_groups()


def _ranks_anew(size: int, rank: int) -> list[int]:
    """What one gets by splitting the world in one fixed order: neighbors form a group."""
    start = rank // size * size
    return list(range(start, start + size))


@on_ranks(WORLD)
def test_gather_groups_have_the_members_of_the_groups_they_mirror(rank: int) -> None:
    """Also that this can fail: ranks that are computed anew, by splitting the world in one fixed
    order, are other ones in some layouts."""
    agree = []
    for order, sizes in LAYOUTS:
        collection = create_all_gather_groups(_init(order, sizes))
        anew = True
        for attribute, mirrored in MIRRORED.items():
            original, made = getattr(collection, mirrored), getattr(collection, attribute)
            ranks = dist.get_process_group_ranks(original)
            assert made is not original
            assert dist.get_process_group_ranks(made) == ranks, (order, sizes)
            assert dist.get_rank(made) == dist.get_rank(original)
            assert everyones(rank, made) == ranks  # it works
            anew &= _ranks_anew(len(ranks), rank) == ranks
        again = collection.dp_cp_ag
        assert create_all_gather_groups(collection).dp_cp_ag is again
        agree.append(all(everyones(anew)))
    assert any(agree) and not all(agree)


@on_ranks(WORLD)
def test_model_on_a_part_of_the_world(rank: int) -> None:
    """On ranks 2 and 3, in groups from core's generator with an offset. Gradients are the mean of
    inputs of that size."""
    generator = RankGenerator(tp=1, ep=1, dp=2, pp=1, cp=1, order="tp-cp-ep-dp-pp", rank_offset=2)
    [ranks] = generator.get_ranks("dp")
    group, singles = dist.new_group(ranks), [dist.new_group([r]) for r in ranks]
    if rank not in ranks:
        assert vars(create_all_gather_groups(SimpleNamespace())) == {}
        return
    groups = SimpleNamespace(dp_cp=group, tp=singles[ranks.index(rank)])
    create_all_gather_groups(groups)
    assert not hasattr(groups, "expt_dp_ag")
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
        (pair if rank == 0 else None, [0, 1]), (dist.group.WORLD if rank < 2 else None, [0, 1, 2])
    ):  # fmt: skip
        with pytest.raises(ValueError) as raised:
            create_all_gather_groups(SimpleNamespace(dp_cp=group))
        assert len(set(everyones(str(raised.value)))) == 1
        said = f"dp_cp_ag: rank 0 has a group of ranks {other}, but rank"
        assert said in str(raised.value)


def _recorded(trainer: TopologyTrainer) -> tuple[list[str], list[tuple[float, float]]]:
    """The group that each collective of two steps went to, and losses and norms."""
    index, log = trainer.chunks[0].megatron_fsdp_dist_index, []
    shard_groups = {index.get_fsdp_group(): "dense", index.get_fsdp_group(True): "expert"}
    original = Communicator.launch

    def launch(self: Communicator, name: str, pairs: Any, **options: Any) -> Any:
        where = f"the {shard_groups[self.group]} shard group" if self.group in shard_groups else ""
        log.append(f"{name} on {where or 'its own group'}")
        return original(self, name, pairs, **options)

    with mock.patch.object(Communicator, "launch", launch):
        steps = [topology_step(trainer, step) for step in range(2)]
    return log, [(step.loss, step.norm) for step in steps]


@pytest.mark.parametrize("strategy", (STRATEGIES[1], STRATEGIES[3]))
@on_ranks(WORLD)
def test_gathers_go_to_their_own_group_and_change_no_number(strategy: str) -> None:
    """Of dense and expert parameters, where weights are gathered once a step and at every use.
    Groups are given, or made as Megatron-LM's --create-all-gather-group asks for and 0.19 does not:
    with and without a collection, once for all wrappers that share one."""
    topology = TOPOLOGIES["ep2"]
    init_topology(topology)
    given, collection = (ProcessGroupCollection.use_mpu_process_groups() for _ in range(2))
    create_all_gather_groups(given)
    option = {"create_all_gather_group": True}

    def recorded(ddp: dict[str, Any], groups: Any) -> tuple[list[str], list[tuple[float, float]]]:
        return _recorded(
            build_topology_trainer(
                topology, case_for(topology), strategy, ddp=ddp, pg_collection=groups
            )
        )

    shared_log, expected = recorded({}, None)
    assert all(line.endswith(" shard group") for line in shared_log)
    kept = []
    for ddp, groups in (({}, given), (option, None), (option, collection), (option, collection)):
        log, found = recorded(ddp, groups)
        assert found == expected, strategy
        gathers = {line for line in log if "gather" in line}
        assert gathers == {"all_gather on its own group"}, gathers
        reductions = {line for line in log if "gather" not in line}
        assert reductions and all(line.endswith(" shard group") for line in reductions)
        assert [line.split()[0] for line in log] == [line.split()[0] for line in shared_log]
        kept.append([getattr(collection, name, None) for name in MIRRORED])
    assert kept[2] == kept[3] and all(kept[2])
