"""An outer data-parallel axis: two optimizer instances of two ranks each, whose shards are replicas
(HSDP) or split again (hybrid FSDP), under every strategy.

Two independent references: stock DDP with two optimizer instances, and plain ZeRO-3 over the
four ranks, which was compared with plain DDP elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard

from tests.lib.gpt.gpt import Trainer
from tests.lib.gpt.topologies import TOPOLOGIES
from tests.lib.gpt.variants import ZERO_3, Variant, compare, marked
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/topology.py", "core/engine/reduction.py", "megatron/wrapper/domains.py")

WORLD = 4
INSTANCES = 2
OUTER = ("no_shard", "optim")


def say_which_is_last_where_megatron_does(trainer: Trainer) -> None:
    """Megatron wires `no_sync` where its own option of overlap is on, whatever a strategy needs."""
    if not trainer.case.overlap:
        trainer.wrapper.config.no_sync_func = None


def experts_are_shared_by_instances(ours: Any, reference: Any, strategy: str) -> None:
    """Each expert of two expert-parallel ranks has a data-parallel rank of each instance."""
    domains = {g.key.domain: g.domain for g in ours.chunks[0].engine.groups}
    assert domains["expert"].axis.size == 1
    assert domains["expert"].outer_size == 2
    assert domains["dense"].axis.size == domains["dense"].outer_size == 2


def placements_tell_the_outer_axis(ours: Any, reference: Any, strategy: str) -> None:
    """What Megatron and checkpoints see of the axes."""
    splits = ours.wrapper.ddp_config.outer_dp_sharding_strategy == "optim"
    assert ours.wrapper.megatron_fsdp_dist_index.hsdp_outer_dp_shard is splits
    outer = Shard(0) if splits else Replicate()
    for param in ours.wrapper.parameters():
        assert param.placements[:2] == (outer, Shard(0))
        assert param.device_mesh.mesh_dim_names[:2] == ("outer_fsdp_dp", "dp_cp")


LIKE_DDP = Variant(
    "like stock DDP",
    world=WORLD,
    instances=INSTANCES,
    random=True,
    steps=2,
    begin=say_which_is_last_where_megatron_does,
)
LIKE_ZERO_3 = Variant(
    "like plain ZeRO-3",
    (ZERO_3,),
    WORLD,
    instances=INSTANCES,
    random=True,
    begin=say_which_is_last_where_megatron_does,
    compare="free",
    steps=5,
    expect=placements_tell_the_outer_axis,
    reference={"strategy": ZERO_3, "instances": 1},
)
EXPERTS = Variant(
    "experts like one instance",
    world=WORLD,
    instances=INSTANCES,
    steps=2,
    full=True,
    topology=TOPOLOGIES["ep2"],
    reference={"strategy": "own", "instances": 1},
    expect=experts_are_shared_by_instances,
)
WAYS = (
    # row, (microbatches, with overlap) of each way
    (LIKE_DDP, ((3, True), (3, False))),
    (LIKE_ZERO_3, ((1, True), (3, False))),
    (EXPERTS, ((1, True), (3, True))),
)


def rows_of(row: Variant, ways: tuple[tuple[int, bool], ...]) -> Iterator[Variant]:
    """The row in each way with each split of the outer axis."""
    for outer in OUTER:
        for microbatches, overlap in ways:
            name = f"{row.name}, outer {outer}, {microbatches} microbatches"
            case = {"microbatches": microbatches, "overlap": overlap}
            if not overlap:
                name = f"{name}, no overlap"
            if not row.topology:
                case["batch"] = 1
            full = row.full or not overlap
            ddp = {"outer_dp_sharding_strategy": outer}
            yield row.but(name, ddp=ddp, full=full, case=case)


ROWS: list[Variant] = []
for _row, _ways in WAYS:
    ROWS.extend(rows_of(_row, _ways))


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_instances_train_like_one_and_like_stock_ddp(row: Variant, rank: int, seed: int) -> None:
    """Trap G9: the outer reduction came too late; G14: only the last microbatch counted, where
    without overlap nothing says which one that is."""
    compare(row, rank, seed)
