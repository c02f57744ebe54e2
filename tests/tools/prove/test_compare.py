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
    found = tensors()
    for name in names or NAMES:
        found[name] = change(found[name])
    return found


def with_nan(value: torch.Tensor) -> torch.Tensor:
    value[3, 2] = math.nan
    return value


def rounded(value: torch.Tensor) -> torch.Tensor:
    return value * (1 + 2e-6)


def halved(value: torch.Tensor) -> torch.Tensor:
    return value * 0.5


def with_rows_moved(value: torch.Tensor) -> torch.Tensor:
    return value.roll(1, 0)


def summed(parts: int) -> dict[str, torch.Tensor]:
    """Of so many microbatches."""
    found = tensors(1)
    for seed in range(2, parts + 1):
        for name, value in tensors(seed).items():
            found[name] += value
    return found


WITHOUT = tensors()
del WITHOUT[NAMES[1]]
ZEROS = torch.zeros(8)
NOISE = torch.full((8,), 1e-9)
LOOKS: dict[str, tuple[Any, Any, str | None]] = {
    "rounding": (changed(rounded), tensors(), None),
    "noise where the reference is zero": (
        {**tensors(), "zero": NOISE},
        {**tensors(), "zero": ZEROS},
        None,
    ),
    "a factor": (changed(halved), tensors(), "6 of 6 parameters, in "),
    "one unit": (
        changed(torch.zeros_like, *NAMES[2:4]),
        tensors(),
        "2 of 6 parameters, in decoder.layers.1",
    ),
    "a missing microbatch": (summed(2), summed(3), "6 of 6 parameters, in "),
    "wrong rows": (
        changed(with_rows_moved, NAMES[0]),
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
    if not found.holds:
        wrong = found.name
        assert wrong in theirs
        assert wrong not in mine or not torch.equal(mine[wrong], theirs[wrong])
    if name == "a factor":
        assert found.difference == pytest.approx(0.5)


def test_one_row_is_not_hidden_by_the_others() -> None:
    name = NAMES[0]
    mine = tensors()
    mine[name] = torch.ones(4096, 7)
    theirs = dict(mine)
    theirs[name] = torch.ones(4096, 7)
    theirs[name][17] *= 1.2
    allowed = compare.bound("bf16", "gradients", 1)
    found = compare.compare_tensors("trained", 1, "gradients", mine, theirs, allowed)
    assert not found.holds
    assert f"of {name} rows 17 to 17 of 4096" in found.remark


def test_steps_by_the_sign_of_noise_are_left_out() -> None:
    gradient = {"bias": torch.tensor([1.0, 1e-7, 1.0, 1e-7])}
    before = {"bias": torch.zeros(4)}
    after = {"bias": torch.ones(4)}
    other = {"bias": torch.tensor([1.0, -1.0, 1.0, -1.0])}
    one = compare.significant_update(before, after, [gradient], 1e-3)
    two = compare.significant_update(before, other, [gradient], 1e-3)
    assert torch.equal(one["bias"], torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert torch.equal(one["bias"], two["bias"])
