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
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO, GIB
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.gpt.expert_memory import holds_what_is_estimated
from tests.lib.gpt.topologies import TOPOLOGIES
from tests.lib.gpt.units import ALL_GIB
from tests.lib.gpt.variants import (
    STRATEGIES,
    ZERO_0,
    ZERO_1,
    ZERO_2,
    ZERO_3,
    Variant,
    compare,
    marked,
)
from tests.lib.ranks.shared_ranks import on_ranks
from tests.lib.ranks.spare_memory import agree_on

CHECKS = (
    "core/config.py",
    "core/engine/construction.py",
    "core/engine/gather.py",
    "megatron/optimizer/clipping.py",
    "plan/unsharded_budget.py",
    "tools/planning/planned.py",
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
    holds_what_is_estimated(ours, strategy)


def all_units_keep_everything(ours: Any, reference: Any, strategy: str) -> None:
    """What their strategies do not keep anyway. The bytes are those of the budget."""
    for group in ours.chunks[0].engine.groups:
        assert group.weights.is_kept and group.grads.is_kept
    holds_what_is_estimated(ours, strategy, ALL_BYTES)


def all_units_stay(ours: Any, reference: Any, strategy: str) -> None:
    """A budget was found. It changes nothing of the groups that keep everything anyway."""
    engine = ours.chunks[0].engine
    of_experts = getattr(ours.chunks[0].ddp_config, EXPERT_STRATEGY)
    assert engine.budget.chosen_for == ALL_BYTES
    for unit in engine.units:
        sharded = [group for group in unit.groups if not group.weights.is_kept]
        assert unit.stays is bool(sharded)
        assert all(group.grads.is_kept for group in unit.trainable_groups)
    assert {strategy, of_experts} & {ZERO_2, ZERO_3}


def rows_of(experts: str, dense: str) -> list[Variant]:
    """The rows in which experts have the first strategy, and dense parameters each other one: by
    default the second."""
    others = tuple(name for name in STRATEGIES if name not in (experts, dense))
    like_ddp = Variant(
        f"experts {experts}, like stock DDP",
        (dense,),
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
        strategies=(dense, *others),
        reference={"strategy": "own"},
        compare="bits but norm",
        full=True,
    )
    others_like_ddp = like_ddp.but(
        f"experts {experts}, others like stock DDP", strategies=others, full=True
    )
    return [like_ddp, others_like_ddp, like_one]


BY_DEFAULT = ((ZERO_0, ZERO_3), (ZERO_1, ZERO_3), (ZERO_2, ZERO_0), (ZERO_3, ZERO_1))
"""Of experts, and of dense parameters."""
ROWS = [row for pair in BY_DEFAULT for row in rows_of(*pair)]
ALL_BYTES = int(ALL_GIB * GIB)


def kept_rows(experts: str, dense: str, full: bool) -> list[Variant]:
    """A budget for everything, given or found: with it, both strategies have the bits of `optim`,
    if both shard main weights."""
    given = Variant(
        f"a budget, experts {experts}, dense {dense}",
        (dense,),
        world=4,
        topology=TOPOLOGIES["ep2"],
        case={"microbatches": 2, "clip": 0.0},
        ddp={EXPERT_STRATEGY: experts, BUDGET: ALL_GIB},
        steps=2,
        full=full,
        compare="bits but norm" if dense != ZERO_0 else "free",
        reference={"strategy": ZERO_1} if dense != ZERO_0 else {},
        expect=all_units_keep_everything,
    )
    found = given.but(
        f"a budget that is found, experts {experts}, dense {dense}",
        ddp={EXPERT_STRATEGY: experts, BUDGET: AUTO},
        begin=lambda trainer: agree_on(trainer.chunks, ALL_BYTES),
        expect=all_units_stay,
        full=True,
    )
    return [given, found]


ROWS += kept_rows(ZERO_1, ZERO_3, full=False)
ROWS += kept_rows(ZERO_3, ZERO_1, full=False)
ROWS += kept_rows(ZERO_2, ZERO_3, full=True)
ROWS += kept_rows(ZERO_3, ZERO_0, full=True)


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_pairs_of_strategies(row: Variant, rank: int, seed: int) -> None:
    """Loss, norm, gradients and weights."""
    compare(row, rank, seed)
