"""Megatron's wrapper over a GPT whose layers' weights are in Transformer Engine's own classes:
after every step bytes and scales are what TE's function makes of the whole main weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.graphs.full_iteration import FullIterationGraphs
from megatron_fsdp_adapter.quantized.weights import QuantizedParams
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.quantized.te_checks import same_planes
from tests.quantized.te_extension import FOLDERS, RELEASES, WITHOUT, run_te
from tests.quantized.te_scaling import quantize_layers
from tests.quantized.te_weights import KNOWS, RECIPES, gathered, te_whole

CASE = Case(hidden=64, heads=2, ffn=192, bf16=True, microbatches=2, lr=3e-3)

pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)


def check_weights(trainer: Trainer, recipe: str, label: str) -> int:
    """Gathered bytes and scales, against TE's function over whole main weights."""
    mains, checked = trainer.params(), 0
    for name, param in gathered(trainer.wrapper.engine):
        same_planes(param, te_whole(recipe, mains[name]), f"{label}, {name}")
        # cuBLAS refuses a scale that begins elsewhere.
        assert all(one.data_ptr() % 16 == 0 for one in KNOWS.scales(param)), f"{label}, {name}"
        checked += 1
    return checked


def _step_after_capture(trainer: Trainer, rank: int) -> None:
    """The optimizer's step behind an iteration that was captured: what follows may be a replay,
    in which nothing of Python runs."""
    flag = SimpleNamespace(now=False)
    trainer.wrapper.captures = FullIterationGraphs(trainer.wrapper.engine, lambda: flag.now)
    flag.now = True
    trainer.wrapper.zero_grad_buffer()
    forward_backward(trainer, batches(CASE, 1, rank, torch.device("cpu")))
    flag.now = False
    before = _bytes(trainer)
    trainer.optimizer.step()
    with mock.patch.object(QuantizedParams, "catch_up", side_effect=AssertionError("runs Python")):
        now = _bytes(trainer)
    changed = [not torch.equal(now[name], before[name]) for name in before]
    assert all(changed), f"{sum(changed)} of {len(changed)} weights have changed"


def _bytes(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of every quantized weight, as a replay gathers them, which shows no parameters."""
    engine, found = trainer.wrapper.engine, {}
    engine.gather.reshard_all()
    for unit in engine.units:
        engine.gather.unshard(unit)
        for group in unit.groups:
            for index, entry in enumerate(group.managed if group.key.quantized else ()):
                planes = [full.params[index].flatten() for full in group.weights]
                found[entry.fqns[0]] = torch.cat(planes).clone()
        engine.gather.reshard(unit)
    return found


def _train(rank: int, world: int, strategy: str) -> None:
    device = init_megatron()
    for recipe in RECIPES:
        trainer = build_trainer(CASE, strategy, device, partial(quantize_layers, recipe=recipe))
        assert check_weights(trainer, recipe, "made") == 4 * CASE.num_layers
        losses = []
        for step in range(3):
            loss, norm = train_step(trainer, batches(CASE, 0, rank, device))
            losses.append(loss)
            assert norm > 0
            check_weights(trainer, recipe, f"{recipe}, {strategy}, step {step}")
        assert losses[2] < losses[1] < losses[0], losses
        _step_after_capture(trainer, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("folder", RELEASES)
def test_a_gpt_in_megatrons_wrapper(folder: Path, strategy: str) -> None:
    run_te(folder, _train, 2, strategy)
