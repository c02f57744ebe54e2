"""`fsdp_unsharded_budget_gib`: units whose weights, and gradients, stay whole over the microbatches
of a step."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.cli import estimate
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.layout import ParamSpec, plan_group, row_granularity
from megatron_fsdp_adapter.diagnostics.memory import Precision
from megatron_fsdp_adapter.sharding.unsharded_budget import GIB, OPTION, unsharded_units
from tests.distributed.gpt import Case, batches, build_trainer, init_megatron, train_step
from tests.distributed.launch import run_ranks
from tests.distributed.memory import measure
from tests.distributed.test_memory import flags

pytestmark = pytest.mark.once

ZERO_1, ZERO_2, ZERO_3 = "optim", "optim_grads", "optim_grads_params"
CASE = Case(num_layers=4, bf16=True, microbatches=3, positions="learned_absolute")


def layouts_of(rows: int, shards: int = 2) -> list[Any]:
    spec = ParamSpec(0, ("w",), (rows, 8), torch.bfloat16, True, row_granularity((rows, 8)))
    return [plan_group([spec], shards)]


@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=6),
    st.integers(0, 30_000),
    st.sampled_from([ZERO_2, ZERO_3]),
)
def test_what_is_kept_is_within_the_budget_and_weights_come_first(sizes, budget, strategy):
    units, row, precision = [layouts_of(size) for size in sizes], STRATEGIES[strategy], Precision()
    kept = unsharded_units(units, row, precision, budget)
    assert 0 <= kept.nbytes <= budget and len(kept.rows) == len(units)
    assert kept.grads == 0 or kept.weights > 0
    if budget == 0:
        assert set(kept.rows) == {row}
    everything = unsharded_units(units, row, precision, 1 << 40)
    assert {one.name for one in everything.rows} == {ZERO_1}
    assert unsharded_units(units, row, precision, everything.nbytes) == everything
    if everything.nbytes and kept.grads:  # no unit was left without weights that would have fitted
        cost = {
            at: unsharded_units([one, []], row, precision, 1 << 40).nbytes
            for at, one in enumerate(units) if kept.rows[at].shard_weights
        }
        assert not cost or min(cost.values()) > 0


def test_units_that_are_gathered_twice_come_before_those_gathered_once():
    """Six units of one size: the embedding is forward-only, the last one before the root stays."""
    units = [layouts_of(16) for _ in range(6)]
    one = unsharded_units(units[:1] + [[]], STRATEGIES[ZERO_3], Precision(), 1 << 30)
    weights = 16 * 8 * 2
    for count, expected in ((1, {5}), (3, {5, 1, 2}), (4, {5, 1, 2, 3}), (5, {5, 1, 2, 3, 0})):
        kept = unsharded_units(
            units, STRATEGIES[ZERO_3], Precision(), count * weights, forward_only=[0]
        )
        assert {at for at, row in enumerate(kept.rows) if not row.shard_weights} == expected
        assert kept.nbytes == count * weights
    assert one.nbytes == weights + 4 * (16 * 8 - 16 * 8 // 2)


def test_a_strategy_that_shards_nothing_has_nothing_to_keep():
    for name in (ZERO_1, "no_shard"):
        kept = unsharded_units([layouts_of(8), []], STRATEGIES[name], Precision(), 1 << 30)
        assert kept.nbytes == 0 and {row.name for row in kept.rows} == {name}
    with pytest.raises(ValueError, match=OPTION):
        unsharded_units([layouts_of(8)], STRATEGIES[ZERO_3], Precision(), -1)


def trained(
    case: Case, rank: int, strategy: str, ddp: dict[str, Any], device: torch.device
) -> tuple[Any, str]:
    """Losses, norms and weights of four steps; what the wrapper printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        trainer = build_trainer(case, strategy, device, ddp=ddp)
    steps = [train_step(trainer, batches(case, step, rank, device)) for step in range(4)]
    return (steps, trainer.params()), said.getvalue()


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][k], v) for k, v in other[1].items())


WEIGHTS_GIB, SOME_GIB, ALL_GIB = 39_200 / GIB, 60_000 / GIB, 1.0


def _train_all(rank: int, world: int) -> dict[str, Any]:
    device, found = init_megatron(), {}
    for number, options in enumerate(({}, {"fsdp_double_buffer": True})):
        sharded, _ = trained(CASE, rank, ZERO_3, options, device)
        kept, _ = trained(CASE, rank, ZERO_1, {}, device)
        runs = {
            gib: trained(CASE, rank, ZERO_3, {**options, OPTION: gib}, device)
            for gib in (0.0, WEIGHTS_GIB, SOME_GIB, ALL_GIB)
        }
        between = runs[SOME_GIB][0]
        found[f"{number}"] = {
            "nothing": same(runs[0.0][0], sharded),
            "weights": same(runs[WEIGHTS_GIB][0], sharded),
            "all": same(runs[ALL_GIB][0], kept),
            "some": max(
                abs(one / other - 1)
                for ours, theirs in zip(between[0], kept[0], strict=True)
                for one, other in zip(ours, theirs, strict=True)
            ),
            "said": [text for _, text in runs.values()],
        }
    single = CASE.but(microbatches=1)
    found["one microbatch"] = same(
        trained(single, rank, ZERO_3, {OPTION: SOME_GIB}, device)[0],
        trained(single, rank, ZERO_3, {}, device)[0],
    )
    points = measure(rank, world, CASE, ZERO_3, ddp={OPTION: SOME_GIB})
    return {**found, "points": points}


def test_budgets_train_alike_and_take_what_estimate_says(capsys):
    """Kept weights change no bit. Where all gradients are kept the bits are those of `optim`; where
    some are, only these units' sums over microbatches are in another order. With one microbatch
    there is one order."""
    measured = run_ranks(_train_all, 2, timeout=300)
    for rank, found in enumerate(measured):
        for number in "01":
            one = found[number]
            assert one["nothing"] and one["weights"] and one["all"], (rank, one)
            assert one["some"] < 1e-3, (rank, one)
        assert found["one microbatch"]
        report = estimated(rank, SOME_GIB, capsys)["strategies"][ZERO_3]
        assert found["points"]["second: at rest"] == report["between_steps"]
        assert 0 < report["kept"]["gradients"] < report["kept"]["weights"] == 7
    said = measured[0]["0"]["said"]
    assert "whole over" not in said[0]
    for text, gib in zip(said[1:], (WEIGHTS_GIB, SOME_GIB, ALL_GIB), strict=True):
        kept = estimated(0, gib, capsys)["strategies"][ZERO_3]["kept"]
        expected = f"weights of {kept['weights']} and gradients of {kept['gradients']} of 7 units"
        assert expected in text
    assert "weights of 6 and gradients of 0" in said[1], said[1]


def estimated(rank: int, gib: float, capsys: Any) -> dict[str, Any]:
    capsys.readouterr()
    words = [f"--{OPTION.replace('_', '-')}", repr(gib)]
    assert estimate.main([*flags(CASE, 2, rank), *words]) == 0
    return json.loads(capsys.readouterr().out)
