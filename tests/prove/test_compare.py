"""A comparison finds what differs, names it, and says what it looks like."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_fsdp_adapter.prove import compare
from megatron_fsdp_adapter.prove.compare import Row

NAMES = [f"decoder.layers.{layer}.{part}.weight" for layer in range(3) for part in ("fc1", "fc2")]
LIMIT = compare.bound("fp32", "gradients", 1)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(24, 7, generator=generator) for name in NAMES}


def row(mine: dict[str, torch.Tensor], parts: int = 1, quantity: str = "gradients") -> Row:
    return compare.compare_tensors("trained", 1, quantity, mine, tensors(), LIMIT, parts)


def test_what_rounding_makes_is_within_the_bound() -> None:
    found = row({name: value * (1 + 2e-6) for name, value in tensors().items()})
    assert found.holds and found.remark == "" and found.compared == len(NAMES)


def test_a_factor_is_named() -> None:
    found = row({name: value * 0.5 for name, value in tensors().items()})
    assert found.difference == pytest.approx(0.5)
    assert found.remark.startswith("all 6 parameters; a constant factor 0.5: a scale")


def test_one_unit_is_named() -> None:
    mine = tensors()
    for name in NAMES[2:4]:
        mine[name] = torch.zeros_like(mine[name])
    found = row(mine)
    assert found.remark == "only decoder.layers.1 (2 of its 2 parameters); zero: it is missing"


def test_a_missing_microbatch_is_guessed() -> None:
    parts = [tensors(seed) for seed in (1, 2, 3)]
    whole = {name: sum(part[name] for part in parts) for name in NAMES}
    two = {name: parts[0][name] + parts[1][name] for name in NAMES}
    found = compare.compare_tensors("trained", 1, "gradients", two, whole, LIMIT, 3)
    assert "like a sum that lacks 1 of 3 microbatches" in found.remark


def test_wrong_rows_are_named() -> None:
    mine = tensors()
    mine[NAMES[0]] = mine[NAMES[0]].roll(1, 0)
    found = row(mine)
    assert found.name == NAMES[0]
    assert "row 0 holds what belongs to row 23: wrong rows" in found.remark


def test_one_row_is_not_hidden_by_the_others() -> None:
    mine = {**tensors(), NAMES[0]: torch.randn(4096, 7)}
    theirs = {**mine, NAMES[0]: mine[NAMES[0]].clone()}
    theirs[NAMES[0]][17] *= 1.2
    allowed = compare.bound("bf16", "gradients", 1)
    found = compare.compare_tensors("trained", 1, "gradients", mine, theirs, allowed)
    assert not found.holds and f"of {NAMES[0]} rows 17 to 17 of 4096" in found.remark


def test_nan_holds_for_no_bound() -> None:
    mine = tensors()
    mine[NAMES[1]][3, 2] = math.nan
    found = row(mine)
    assert not found.holds and found.name == NAMES[1]
    assert "NaN: memory was read that nobody had written" in found.remark


def test_names_that_one_lacks_are_a_difference() -> None:
    mine = tensors()
    del mine[NAMES[1]]
    found = row(mine)
    assert not found.holds and found.name == NAMES[1]


def test_noise_where_the_reference_is_zero_is_rounding() -> None:
    theirs = {**tensors(), "zero": torch.zeros(8)}
    mine = {**tensors(), "zero": torch.full((8,), 1e-9)}
    assert compare.compare_tensors("trained", 1, "gradients", mine, theirs, LIMIT).holds


def test_steps_by_the_sign_of_noise_are_left_out() -> None:
    gradient = {"bias": torch.tensor([1.0, 1e-7, 1.0, 1e-7])}
    before = {"bias": torch.zeros(4)}
    one = compare.significant_update(before, {"bias": torch.ones(4)}, [gradient], 1e-3)
    other = {"bias": torch.tensor([1.0, -1.0, 1.0, -1.0])}
    assert torch.equal(one["bias"], torch.tensor([1.0, 0.0, 1.0, 0.0]))
    two = compare.significant_update(before, other, [gradient], 1e-3)
    assert torch.equal(one["bias"], two["bias"])


def _rows(*wrong: tuple[int, str]) -> list[Row]:
    return [
        Row("trained", step, quantity, 1.0 if (step, quantity) in wrong else 0.0, 0.1)
        for step in (1, 2)
        for quantity in ("loss", "gradients", "norm", "update")
    ]


def test_the_first_difference_says_where_to_look() -> None:
    assert compare.conclusion(_rows()) is None
    stale = compare.conclusion(_rows((2, "loss"), (2, "gradients")))
    assert stale is not None and "other weights than the optimizer wrote" in stale
    step = compare.conclusion(_rows((1, "update")))
    assert step is not None and "the optimizer's side" in step
    backward = compare.conclusion(_rows((1, "gradients"), (1, "norm"), (1, "update")))
    assert backward is not None and "the reduction" in backward


def test_bounds_are_eps_times_the_stated_factor() -> None:
    for dtype, factors in compare.FACTORS.items():
        for quantity, factor in factors.items():
            assert compare.bound(dtype, quantity, 3) == pytest.approx(
                3 * factor * compare.EPS[dtype]
            )
