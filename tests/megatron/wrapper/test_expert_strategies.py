"""Experts with a strategy of their own: every pair of strategies of dense and expert parameters
trains like stock DDP, and with one microbatch to the digit like one strategy for both.

Four ranks, of which two have the same experts: a sum over two has one order.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard

from megatron_fsdp_adapter.core.config import STRATEGIES as STRATEGIES_BY_NAME
from megatron_fsdp_adapter.core.topology import EXPERT
from megatron_fsdp_adapter.megatron.options.table import EXPERT_STRATEGY
from tests.lib.gpt.topologies import TOPOLOGIES
from tests.lib.gpt.variants import STRATEGIES, Variant, compare, marked
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "core/config.py",
    "core/engine/construction.py",
    "core/engine/gather.py",
    "megatron/optimizer/clipping.py",
)


def each_kind_has_its_strategy(ours: Any, reference: Any, strategy: str) -> None:
    """Each group is sharded as its kind of parameters is to be, also where a unit has both."""
    engine = ours.chunks[0].engine
    of_experts = getattr(ours.chunks[0].ddp_config, EXPERT_STRATEGY)
    assert of_experts != strategy
    kinds = [{group.key.domain for group in unit.groups} for unit in engine.units]
    assert {"dense", EXPERT} in kinds
    for group in engine.groups:
        is_expert = group.key.domain == EXPERT
        row = STRATEGIES_BY_NAME[of_experts if is_expert else strategy]
        assert group.weights.is_kept is not row.shard_weights
        assert group.grads.is_kept is not row.shard_grads
        for pair in engine.pairs:
            if pair.group is group:
                placed = Shard(0) if row.shard_main else Replicate()
                assert pair.sharded.placements == (placed,)


def rows_of(experts: str) -> list[Variant]:
    """The rows in which experts have this strategy, and dense parameters each other one."""
    like_ddp = Variant(
        f"experts {experts}, like stock DDP",
        tuple(name for name in STRATEGIES if name != experts),
        world=4,
        topology=TOPOLOGIES["ep2"],
        case={"microbatches": 2, "clip": 0.05},
        ddp={EXPERT_STRATEGY: experts},
        compare="free",
        steps=2,
        expect=each_kind_has_its_strategy,
    )
    like_one = like_ddp.but(
        f"experts {experts}, like one strategy",
        case={"microbatches": 1, "clip": 0.0},
        reference={"strategy": "own"},
        compare="bits but norm",
        full=True,
    )
    return [like_ddp, like_one]


ROWS = [row for name in STRATEGIES for row in rows_of(name)]


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_pairs_of_strategies(row: Variant, rank: int, seed: int) -> None:
    """Loss, norm, gradients and weights."""
    compare(row, rank, seed)
