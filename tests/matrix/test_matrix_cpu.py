"""Cells of the CPU matrix against stock DDP: a slice by default, all with --full.

    python -m tests.matrix run --array cpu --results FILE      # the same, resumably
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.config import poison_asked
from tests.distributed.launch import run_ranks
from tests.matrix import cells
from tests.matrix.results import PASSED, Result, Setting, known
from tests.matrix.run import run
from tests.matrix.table import Cell, cell_named, name_of

ALL = cells.cached("cpu")
OF_FOUR = 3
"""How many cells of four ranks are in the slice; those of two all are."""


def in_slice(cell: Cell) -> bool:
    four = [one for one in ALL if one["ranks"] == 4][:OF_FOUR]
    return cell["ranks"] == 2 or cell in four


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Result]:
    """Of the cells whose tests were chosen, by digest."""
    chosen = [
        item.callspec.params["cell"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_cell"
    ]
    folder = tmp_path_factory.mktemp("matrix")
    found = run(chosen, _setting(), folder / "results.jsonl", folder / "notes")
    return known(found)


def _setting() -> Setting:
    return Setting("tiny", "cpu", poison_asked())


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=() if in_slice(c) else pytest.mark.full, id=name_of(c)) for c in ALL],
)
def test_cell(outcomes: Mapping[str, Result], cell: Cell) -> None:
    """Gradients, norm and loss of the first step, loss and norm of two more, and how far the
    weights have moved."""
    result = outcomes.get(_setting().digest(cell))
    assert result is not None, "the cell was not reached"
    assert result.status == PASSED, "\n".join(result.problems)
    assert set(result.measures) == {
        "gradient", "gradient, element", "norm", "norm, later", "loss", "loss, later", "movement",
        "movement, element", "weights at the start", "weights at the start, element",
    }  # fmt: skip


# What the comparison would see. FP8 and experts have the widest bounds.


def _gradients_are_scaled(trainer: Any) -> None:
    for _, pair in trainer._pairs():
        if pair.sharded.grad is not None:
            pair.sharded.grad._local_tensor.mul_(1.3)


def _one_element_is_lost(trainer: Any) -> None:
    """Of one shard, on one rank."""
    if dist.get_rank() == 1:
        _, pair = next(iter(trainer._pairs()))
        local = pair.sharded.grad._local_tensor.view(-1)
        local[local.abs().argmax()] = 0.0


def _one_element_is_not_a_number(trainer: Any) -> None:
    if dist.get_rank() == 1:
        _, pair = next(iter(trainer._pairs()))
        pair.sharded.grad._local_tensor.view(-1)[-1] = float("nan")


FAULTS: Mapping[str, Callable[[Any], None]] = {
    "scaled": _gradients_are_scaled,
    "lost": _one_element_is_lost,
    "not a number": _one_element_is_not_a_number,
}
PLAIN, WIDE = "cpu microbatches=3", "cpu precision=bf16 layers=moe wire=bf16"


def _see_faults(rank: int, world: int) -> dict[str, dict[str, list[str]]]:
    """Cell and fault -> the measures that do not hold."""
    from tests.matrix import training
    from tests.matrix.bounds import bounds_of

    groups, found = training.Groups(), {}
    original = training.run_schedule

    def with_fault(fault: Callable[[Any], None]) -> Any:
        def schedule(trainer: Any, step: int, **more: Any) -> float:
            loss = original(trainer, step, **more)
            if trainer.strategy is not None:
                fault(trainer)
            return loss

        return schedule

    fp8 = bounds_of(cell_named("gpu precision=fp8_delayed layers=te_grouped wire=bf16"))
    for name, bounds in ((PLAIN, None), (WIDE, None), (f"{WIDE}, bounds of FP8", fp8)):
        cell = cell_named(name.split(",")[0])
        found[name] = {}
        for fault, act in {"none": lambda trainer: None, **FAULTS}.items():
            with (
                mock.patch.object(training, "run_schedule", with_fault(act)),
                mock.patch.object(training, "bounds_of", lambda c, b=bounds: b or bounds_of(c)),
            ):
                measures = training.check_cell(cell, "tiny", groups)
            found[name][fault] = [m for m, one in measures.items() if not one.holds]
    return found


def test_the_comparison_sees_a_fault_within_the_widest_bounds_too() -> None:
    outcomes = run_ranks(_see_faults, 2)
    expected = {
        "none": set(), "scaled": {"gradient", "norm"}, "lost": {"gradient, element"},
        "not a number": {"gradient", "gradient, element"},
    }  # fmt: skip
    for cell, faults in outcomes[0].items():
        for fault, measures in expected.items():
            seen = {m for outcome in outcomes for m in outcome[cell][fault]}
            assert seen >= measures, (cell, fault, seen)
            assert bool(seen) == (fault != "none"), (cell, fault, seen)
        assert set(faults) == set(expected)


def _put_together(rank: int, world: int, name: str) -> int:
    """How many tensors are whole, and the same as without the distributed optimizer."""
    from tests.matrix import training
    from tests.matrix.table import REFERENCE

    cell = {**cell_named(name), **REFERENCE}
    groups = training.Groups()
    device = groups.use(training.topology_of(cell))
    found = []
    for split in (False, True):
        # On CPUs there are no FP8 weights: what is done with those is done with all.
        with mock.patch.object(training, "has_fp8_weights", lambda precision, on=split: on):
            trainer = training.build(cell, "tiny", device)
        whole = {"": torch.empty(0)} if split else {}
        before = training._main_weights(trainer, whole)
        training.run_schedule(trainer, 0)
        gradients = training._gradients(trainer, split)
        training._updated(trainer)
        after = training._main_weights(trainer, whole)
        found.append((before, gradients, after))
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys() and len(one) > 10
        for key, value in one.items():
            torch.testing.assert_close(value, other[key], rtol=1e-6, atol=1e-7, msg=key)
    assert any(not torch.equal(one, found[0][2][key]) for key, one in found[0][0].items())
    return len(found[0][0])


@pytest.mark.parametrize("name", ("cpu precision=bf16", "cpu precision=bf16 layers=moe ep=2"))
def test_what_stock_ddp_splits_is_put_together(name: str) -> None:
    """The reference of FP8 weights has the distributed optimizer."""
    assert min(run_ranks(_put_together, 2, name)) > 10


def _train_beside_unfused(rank: int, world: int, name: str) -> list[str]:
    """The measures that do not hold, with a reference whose gradients are not fused."""
    from tests.matrix import training
    from tests.matrix.table import REFERENCE

    unfused = {**REFERENCE, "fusion": "off"}
    with mock.patch.object(training, "REFERENCE", unfused):
        found = training.check_cell(cell_named(name), "tiny", training.Groups())
    return [f"{m}: {one.error} at {one.where}" for m, one in found.items() if not one.holds]


@pytest.mark.parametrize("more", ("", " strategy=optim vpp=2"))
def test_a_tied_weight_of_the_last_stage_has_all_its_fused_gradients(more: str) -> None:
    """Its embedding is there for multi-token prediction, and its weight is handed to the output
    layer twice. Stock DDP with fused gradients loses the embedding's."""
    name = f"cpu{more} fusion=on microbatches=3 trained=tied layers=mtp pp=2"
    assert run_ranks(_train_beside_unfused, 2, name) == [[], []]


def test_not_a_number_does_not_hold() -> None:
    from tests.matrix.training import Finding, _note, _peak

    findings: dict[str, Finding] = {}
    for error in (0.5, float("nan"), 0.1):
        _note(findings, "m", Finding(error, 1.0, ""))
    assert not findings["m"].holds
    assert _peak(torch.tensor([1.0, float("nan")])) == float("inf")
    assert _peak(torch.tensor([])) == 0.0


def test_the_slice_is_of_two_and_four_ranks() -> None:
    chosen = [cell for cell in ALL if in_slice(cell)]
    assert {cell["ranks"] for cell in chosen} == {2, 4} and len(chosen) >= 10
