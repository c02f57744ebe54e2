"""Life cycles of Megatron-LM's training on GPUs: resumes by way of `convert`, after a kill, with
other options of this package. They print the losses and norms of stock DDP.

    MEGATRON_LM_PATH=its/folder python -m pytest -q -rA tests/gpu/test_gpu_cycles.py

`python -m tests.hunt cycles --device cuda` draws others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.gpu import shared_device
from tests.lib.hunt import verdict
from tests.lib.hunt.cycle_grammar import TE
from tests.lib.hunt.cycle_hunting import CycleHunt
from tests.lib.hunt.cycles import machine_of
from tests.lib.hunt.programs import Program, Statement

CHECKS = ("checkpoint/convert/conversion.py", "megatron/checkpoint/megatron_saves.py")

GPUS = 1
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
WORLD = str(min(2, shared_device.devices()))
"""Ranks, where the layout of a run does not say how many."""

CYCLES = {
    "fp32": (
        ("model", "--swiglu"),
        ("stage", "optim_grads_params kill"),
        ("world", WORLD),
        ("own", "--fsdp-unsharded-budget-gib auto"),
        ("stage", "stock exit"),
        ("world", "1"),
        ("stage", "optim exit"),
        ("world", WORLD),
    ),
    "graphs of layers, bf16": (
        ("model", "--transformer-impl transformer_engine --bf16"),
        ("model", "--te-rng-tracker"),
        ("stage", "stock exit"),
        ("world", WORLD),
        ("stage", "optim_grads_params kill"),
        ("world", WORLD),
        ("own", "--cuda-graph-impl local --cuda-graph-warmup-steps 1 --fsdp-double-buffer"),
    ),
}

pytestmark = pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no pretrain_gpt.py")


@pytest.fixture(scope="module")
def hunter() -> Iterator[CycleHunt]:
    found = CycleHunt(Path(CHECKOUT).resolve(), machine_of("cuda"), parsers=({}, {}))
    yield found
    found.end()


@pytest.mark.parametrize("name", CYCLES)
def test_a_cycle_equals_stock(hunter: CycleHunt, name: str) -> None:
    asked = any(TE in text for _, text in CYCLES[name])
    if asked and TE not in hunter.machine.has:
        pytest.skip("needs Transformer Engine")
    cycle = Program(tuple(Statement(*one) for one in CYCLES[name]))
    found = hunter.judged(cycle)
    assert found.outcome == verdict.OK, f"{found.signature}\n{found.detail}"
