"""Training loops as users of PyTorch write them. Each runs as it stands on sharded models and on
unsharded ones whose losses are the mean over all ranks' data, and must leave the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.distributed import gradient_loops, state_loops, step_loops, weight_loops
from tests.distributed.plain import device
from tests.distributed.plain_side import Loop, Side

WEIGHTS = 2e-5
"""Relative, of a weight tensor's norm after the steps of a loop."""

LOOPS: Mapping[str, Loop] = {
    **gradient_loops.LOOPS, **state_loops.LOOPS, **step_loops.LOOPS, **weight_loops.LOOPS,
}  # fmt: skip

NEEDS_KEPT_WEIGHTS = ("a_rank_without_data",)
"""Where weights are sharded all ranks gather them in each forward."""

NEEDS_SHARDED_GRADS = ("an_optimizer_every_other_step", "gradients_replaced_between_backwards")
"""Several backwards outside of `no_sync`, or an optimizer's gradients kept for a later one."""

NEEDS_KEPT_GRADS = ("a_rank_without_microbatches",)
"""Where gradients are sharded all ranks reduce them in each backward."""


def strategies_of(name: str) -> list[str]:
    """Under which a loop can run."""
    return [
        strategy
        for strategy, row in STRATEGIES.items()
        if not (name in NEEDS_SHARDED_GRADS and not row.shard_grads)
        and not (name in NEEDS_KEPT_GRADS and row.shard_grads)
        and not (name in NEEDS_KEPT_WEIGHTS and row.shard_weights)
    ]


def check_loops(
    rank: int, world: int, names: Iterable[str], outer: int = 0, every: bool = True,
    **options: Any,
) -> None:
    """Every strategy against the unsharded side; without `every`, the one that shards most and one
    of the others, in turn. outer: the size of an outer axis, if there is to be one; options: of
    `fully_shard_model`."""
    if outer:
        options["mesh"] = init_device_mesh(device().type, (outer, world // outer))
    problems = []
    for position, name in enumerate(names):
        reference = Side(rank, world, None)
        LOOPS[name](reference)
        expected = reference.weights()
        *others, most = strategies_of(name)
        chosen = others if every else others[position % len(others) :][:1]
        for strategy in (*chosen, most):
            side = Side(rank, world, strategy, options)
            try:
                LOOPS[name](side)
            except Exception as error:  # told with the others, by name
                problems.append(f"{name}, {strategy}: {type(error).__name__}: {error}")
                continue
            problems += [f"{name}, {strategy}, {line}" for line in _differences(side, expected)]
            if side.numbers != pytest.approx(reference.numbers, rel=2e-5, abs=1e-7):
                problems.append(f"{name}, {strategy}: {side.numbers} != {reference.numbers}")
    assert not problems, "\n".join(problems)


def _differences(side: Side, expected: Mapping[str, torch.Tensor]) -> list[str]:
    found = side.weights()
    assert found.keys() == expected.keys()
    lines = []
    for name, value in expected.items():
        error = float((found[name] - value).norm() / value.norm())
        if not error <= WEIGHTS:
            lines.append(f"{name}: off by {error:.1e}")
    return lines[:3]
