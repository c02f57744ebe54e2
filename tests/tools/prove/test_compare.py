"""A comparison finds what differs, and says where."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.tools.prove import compare
from megatron_fsdp_adapter.tools.prove.compare import ComparedRow

CHECKS = ("tools/prove/compare.py",)

NAMES = [f"decoder.layers.{layer}.{part}.weight" for layer in range(3) for part in ("fc1", "fc2")]
LIMIT = compare.bound("fp32", "gradients", 1)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(24, 7, generator=generator) for name in NAMES}


def row(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> ComparedRow:
    return compare.compare_tensors("trained", 1, "gradients", mine, theirs, LIMIT)


def changed(change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    """The reference with some of its tensors, by default all, another."""
    return {n: change(v) if n in (names or NAMES) else v for n, v in tensors().items()}


def with_nan(value: torch.Tensor) -> torch.Tensor:
    return value.index_put((torch.tensor([3]), torch.tensor([2])), torch.tensor(math.nan))


THREE = [tensors(seed) for seed in (1, 2, 3)]
SUMS = [{name: sum(part[name] for part in parts) for name in NAMES} for parts in (THREE[:2], THREE)]
WITHOUT = {name: value for name, value in tensors().items() if name != NAMES[1]}
ZEROS = torch.zeros(8)
NOISE = torch.full((8,), 1e-9)
LOOKS: dict[str, tuple[Any, Any, str | None]] = {
    "rounding": (changed(lambda v: v * (1 + 2e-6)), tensors(), None),
    "noise where the reference is zero": (
        {**tensors(), "zero": NOISE},
        {**tensors(), "zero": ZEROS},
        None,
    ),
    "a factor": (changed(lambda v: v * 0.5), tensors(), "6 of 6 parameters, in "),
    "one unit": (
        changed(torch.zeros_like, *NAMES[2:4]),
        tensors(),
        "2 of 6 parameters, in decoder.layers.1",
    ),
    "a missing microbatch": (*SUMS, "6 of 6 parameters, in "),
    "wrong rows": (
        changed(lambda v: v.roll(1, 0), NAMES[0]),
        tensors(),
        "1 of 6 parameters, in decoder.layers.0",
    ),
    "NaN": (
        changed(with_nan, NAMES[1]),
        tensors(),
        f"1 of 6 parameters, in decoder.layers.0; of {NAMES[1]} rows 3 to 3 of 24",
    ),
    "a name that one lacks": (WITHOUT, tensors(), "only one of the two has it"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_difference_is_named_with_where_it_is(name: str) -> None:
    mine, theirs, remark = LOOKS[name]
    found = row(mine, theirs)
    assert found.holds == (remark is None)
    assert (remark or "") in found.remark
    assert found.compared == len(theirs)
    wrong = [n for n in theirs if n not in mine or not torch.equal(mine[n], theirs[n])]
    assert found.holds or found.name in wrong
    assert name != "a factor" or found.difference == pytest.approx(0.5)


def test_one_row_is_not_hidden_by_the_others() -> None:
    mine = {**tensors(), NAMES[0]: torch.ones(4096, 7)}
    theirs = {**mine, NAMES[0]: mine[NAMES[0]].clone()}
    theirs[NAMES[0]][17] *= 1.2
    allowed = compare.bound("bf16", "gradients", 1)
    found = compare.compare_tensors("trained", 1, "gradients", mine, theirs, allowed)
    assert not found.holds
    assert f"of {NAMES[0]} rows 17 to 17 of 4096" in found.remark


def test_steps_by_the_sign_of_noise_are_left_out() -> None:
    gradient = {"bias": torch.tensor([1.0, 1e-7, 1.0, 1e-7])}
    before = {"bias": torch.zeros(4)}
    one = compare.significant_update(before, {"bias": torch.ones(4)}, [gradient], 1e-3)
    other = {"bias": torch.tensor([1.0, -1.0, 1.0, -1.0])}
    assert torch.equal(one["bias"], torch.tensor([1.0, 0.0, 1.0, 0.0]))
    two = compare.significant_update(before, other, [gradient], 1e-3)
    assert torch.equal(one["bias"], two["bias"])
