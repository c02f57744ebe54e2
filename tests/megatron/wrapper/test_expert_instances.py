"""Experts with replicas of their own, whose shards are repeated or split again otherwise than those
of dense parameters: they train like stock DDP, and with one microbatch to the digit like experts
with the replicas of all.

Four ranks, of which two have the same experts; and eight, of which four have.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.tensor import Replicate, Shard

from megatron_fsdp_adapter.core.topology import DENSE, EXPERT, ShardDomain
from megatron_fsdp_adapter.megatron.options.table import (
    EXPERT_INSTANCES,
    EXPERT_OUTER,
    EXPERT_STRATEGY,
    INSTANCES,
    OUTER,
    expert_instances_of,
    read,
)
from megatron_fsdp_adapter.megatron.wrapper.process_groups import create_all_gather_groups
from tests.lib.gpt.expert_memory import holds_what_is_estimated
from tests.lib.gpt.topologies import (
    TOPOLOGIES,
    build_topology_trainer,
    case_for,
    init_topology,
)
from tests.lib.gpt.variants import (
    ZERO_0,
    ZERO_1,
    ZERO_2,
    ZERO_3,
    Variant,
    compare,
    marked,
    nothing_more,
)
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "core/distributed_index.py",
    "core/engine/construction.py",
    "megatron/optimizer/clipping.py",
    "megatron/wrapper/announcement.py",
    "megatron/wrapper/expert_instances.py",
    "megatron/wrapper/process_groups.py",
    "tools/planning/planned.py",
)

OPTIM = "optim"
REPEATED = "no_shard"


def each_kind_has_its_replicas(ours: Any, reference: Any, strategy: str) -> None:
    """Each kind has as many replicas as it is to have, whose shards are equal or parts."""
    [chunk] = ours.chunks
    ddp = chunk.ddp_config
    index = chunk.megatron_fsdp_dist_index
    replicas = {DENSE: read(ddp, INSTANCES), EXPERT: expert_instances_of(ddp)}
    outer = {DENSE: read(ddp, OUTER), EXPERT: read(ddp, EXPERT_OUTER) or read(ddp, OUTER)}
    found = {group.key.domain: group for group in chunk.engine.groups}
    assert found.keys() == replicas.keys()
    for kind, group in found.items():
        ranks = index.get_dp_group(kind == EXPERT).size()
        assert group.domain.outer_size == replicas[kind]
        assert group.domain.axis.size * replicas[kind] == ranks
        splits = outer[kind] == OPTIM and replicas[kind] > 1
        assert group.shards.splits_outer is index.splits_outer(kind) is splits
        across = index.get_outer_fsdp_group(kind == EXPERT)
        assert (across is None) is (replicas[kind] == 1)
    for pair in chunk.engine.pairs:
        kind = pair.group.key.domain
        splits = found[kind].shards.splits_outer
        expected = [Shard(0) if splits else Replicate()] if replicas[kind] > 1 else []
        assert list(pair.sharded.placements[:-1]) == expected
    holds_what_is_estimated(ours, strategy)


Replicas = tuple[int, str]
"""A number of replicas, and their outer strategy."""


def row_of(
    dense: Replicas, experts: Replicas, strategies: tuple[str, str], **changes: Any
) -> Variant:
    """A row of dense parameters and experts, like stock DDP."""
    ddp = {
        OUTER: dense[1],
        EXPERT_INSTANCES: experts[0],
        EXPERT_OUTER: experts[1],
        EXPERT_STRATEGY: strategies[1],
    }
    kinds = zip((dense, experts), strategies, strict=True)
    named = [f"{count} {outer} of {strategy}" for (count, outer), strategy in kinds]
    row = Variant(
        f"dense {named[0]}, experts {named[1]}",
        strategies[:1],
        world=4,
        topology=TOPOLOGIES["ep2"],
        instances=dense[0],
        case={"microbatches": 2, "clip": 0.05},
        ddp=ddp,
        compare="free",
        steps=2,
        reference={"instances": 1},
        expect=each_kind_has_its_replicas,
    )
    return row.but(row.name, **changes)


ALONE = (1, REPEATED)
BY_DEFAULT = (
    # of dense parameters, of experts; their strategies
    ((2, OPTIM), ALONE, (ZERO_3, ZERO_1)),
    (ALONE, (2, OPTIM), (ZERO_3, ZERO_2)),
    (ALONE, (2, REPEATED), (ZERO_1, ZERO_3)),
    ((2, OPTIM), (2, REPEATED), (ZERO_2, ZERO_1)),
)
FULL = (
    ((2, REPEATED), ALONE, (ZERO_3, ZERO_3)),
    ((2, REPEATED), (2, OPTIM), (ZERO_0, ZERO_3)),
    ((2, OPTIM), (2, OPTIM), (ZERO_1, ZERO_3)),
    ((2, REPEATED), (2, REPEATED), (ZERO_3, ZERO_0)),
)
OF_EIGHT = (
    ((2, OPTIM), ALONE),
    ((2, OPTIM), (2, REPEATED)),
    ((2, REPEATED), (4, OPTIM)),
    ((4, OPTIM), (2, OPTIM)),
    (ALONE, (2, OPTIM)),
    (ALONE, (4, REPEATED)),
)


def like_replicas_of_all(row: Variant) -> Variant:
    """The row beside one in which experts have the replicas and the strategy of dense parameters.
    Each expert is on two ranks: a sum over two has one order."""
    return row.but(
        f"{row.name}, like replicas of all",
        case={"microbatches": 1, "clip": 0.0},
        reference={"strategy": "own", "ddp": {OUTER: row.ddp[OUTER]}},
        compare="bits but norm",
        full=True,
    )


ROWS: list[Variant] = []
for _chosen in BY_DEFAULT:
    ROWS += [row_of(*_chosen), like_replicas_of_all(row_of(*_chosen))]
for _chosen in FULL:
    ROWS += [row_of(*_chosen, full=True), like_replicas_of_all(row_of(*_chosen))]
for _option in ("chunked_optimizer_state_offload", "fsdp_double_buffer"):
    for _chosen in BY_DEFAULT[:2]:
        _row = row_of(*_chosen, full=True)
        _ddp = {**_row.ddp, _option: True}
        ROWS.append(_row.but(f"{_row.name}, {_option}", ddp=_ddp, expect=nothing_more))
for _dense, _experts in OF_EIGHT:
    for _strategies in ((ZERO_3, ZERO_1), (ZERO_1, ZERO_3)):
        _row = row_of(_dense, _experts, _strategies, world=8, full=True)
        ROWS.append(_row.but(f"8 ranks, {_row.name}"))


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_replicas_of_experts(row: Variant, rank: int, seed: int) -> None:
    """Loss, norm, gradients and weights."""
    compare(row, rank, seed)


def expert_domain(**options: Any) -> ShardDomain:
    """The experts' domain of a model with two replicas of them; collective."""
    topology = TOPOLOGIES["ep2"]
    ddp = {EXPERT_INSTANCES: 2, **options.pop("ddp", {})}
    trainer = build_topology_trainer(topology, case_for(topology), ZERO_3, ddp=ddp, **options)
    [domain] = {
        id(group.domain): group.domain
        for group in trainer.chunks[0].engine.groups
        if group.key.domain == EXPERT
    }.values()
    return domain


@on_ranks(4)
def test_groups_are_made_once_where_megatron_has_none(rank: int) -> None:
    """Of `parallel_state`, and of a collection, also if its group for gathers has other ranks."""
    init_topology(TOPOLOGIES["ep2"])
    everyone = parallel_state.get_expert_data_parallel_group()
    first = expert_domain()
    assert first.axis.ranks == (rank,)
    assert first.outer is not None and first.outer.group is everyone
    given = create_all_gather_groups(ProcessGroupCollection.use_mpu_process_groups())
    before = given.expt_dp_ag
    for options in ({"ddp": {"create_all_gather_group": True}}, {"pg_collection": given}):
        again = expert_domain(**options)
        assert again.axis.group is again.reduce_group is first.axis.group
        assert again.gather_group is not again.reduce_group
        assert dist.get_process_group_ranks(again.gather_group) == [rank]
    assert before is not given.expt_dp_ag is again.gather_group


@on_ranks(4)
def test_groups_of_a_collection_with_the_right_ranks_are_used(rank: int) -> None:
    """As a Megatron would make them that knows the option."""
    init_topology(TOPOLOGIES["ep2"])
    given = ProcessGroupCollection.use_mpu_process_groups()
    alone = [dist.new_group([one]) for one in range(4)]
    given.intra_expt_dp = alone[rank]
    assert expert_domain(pg_collection=given).axis.group is alone[rank]


SAID = (
    # optimizer instances, options, what is printed of ranks
    (1, {}, "over 4 ranks, "),
    (2, {}, "over 2 ranks in 2 replicas, "),
    (2, {OUTER: OPTIM}, "over 2 ranks in 2 replicas, split again, "),
    (1, {EXPERT_INSTANCES: 2}, "over 4 ranks (expert: 1 ranks in 2 replicas), "),
    (
        2,
        {OUTER: OPTIM, EXPERT_INSTANCES: 1},
        "over 2 ranks in 2 replicas, split again (expert: 2 ranks), ",
    ),
    (
        2,
        {EXPERT_OUTER: OPTIM},
        "over 2 ranks in 2 replicas (expert: 1 ranks in 2 replicas, split again), ",
    ),
)


@on_ranks(4)
def test_the_first_rank_prints_replicas(rank: int) -> None:
    topology = TOPOLOGIES["ep2"]
    for instances, options, expected in SAID:
        init_topology(topology, instances)
        ddp = {INSTANCES: instances, **options}
        with redirect_stdout(io.StringIO()) as said:
            build_topology_trainer(topology, case_for(topology), ZERO_3, ddp=ddp)
        assert (expected in said.getvalue()) is (rank == 0), said.getvalue()
