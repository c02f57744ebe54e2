"""Megatron's wrapper over a GPT whose layers' weights are in Transformer Engine's own classes.

After every step bytes and scales are what TE's function makes of the whole main weights. They are
exported as modules compute with them, and back bit for bit after their memory was given back.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_fsdp_adapter import export_weights, release_memory, return_memory
from megatron_fsdp_adapter.core.engine.buffer import COMPUTE_WEIGHTS, MAIN_WEIGHTS
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.lib.quantized.te_checks import same
from tests.lib.quantized.te_extension import FOLDERS, RELEASES, WITHOUT, run_te
from tests.lib.quantized.te_models import check_weights, computed_with
from tests.lib.quantized.te_scaling import quantize_layers
from tests.lib.quantized.te_weights import RECIPES

CHECKS = ("rollout/export.py", "quantized/weights.py")

CASE = Case(hidden=64, heads=2, ffn=192, bf16=True, microbatches=2, lr=3e-3)

pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)


def _exported(rank: int, world: int, strategy: str) -> None:
    device = init_megatron()
    for recipe in RECIPES:
        trainer, plain = (
            build_trainer(CASE, strategy, device, partial(quantize_layers, recipe=f"te {recipe}"))
            for _ in range(2)
        )
        for step in range(3):
            data = batches(CASE, step, rank, device)
            assert train_step(trainer, data) == train_step(plain, data), (recipe, step)
            label = f"{recipe} {strategy} {step}"
            assert check_weights(trainer, recipe, label) == 4 * CASE.num_layers
            _check(trainer, recipe, label)
            release_memory(trainer.wrapper, trainer.optimizer, keep=[MAIN_WEIGHTS, COMPUTE_WEIGHTS])
            if step:  # before a forward brings them up to date
                dict(export_weights(trainer.wrapper, quantized=True))
            release_memory(trainer.wrapper, trainer.optimizer)
            return_memory(trainer.wrapper, trainer.optimizer)
        mine, theirs = (computed_with(one.wrapper.engine, recipe) for one in (trainer, plain))
        for name, value in mine.items():
            same(value.float(), theirs[name].float(), f"{recipe} {name}")
        forward_backward(trainer, batches(CASE, 3, rank, device))


def _check(trainer: Trainer, recipe: str, label: str) -> None:
    values = dict(export_weights(trainer.wrapper, dtype=torch.float32))
    mains = trainer.params()
    for name, value in values.items():
        same(value, mains[f"module.{name}" if f"module.{name}" in mains else name], label)
    found = dict(export_weights(trainer.wrapper, quantized=True))
    expected = computed_with(trainer.wrapper.engine, recipe)
    assert len(expected) == 8 * CASE.num_layers
    assert expected.keys() < found.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, (label, name)
        same(found[name].float(), value.float(), f"{label} {name}")
        if recipe == "block128" and name.endswith("_scale_inv"):
            bytes_of = found[name.removesuffix("_scale_inv")].float()
            rows, columns = bytes_of.shape
            scales = value.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
            stood = values[name.removesuffix("_scale_inv")]
            assert (bytes_of * scales - stood).abs().max() <= 0.08 * stood.abs().max()
    for name in values.keys() - expected.keys():
        assert found[name].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(s, marks=pytest.mark.full if s in STRATEGIES[:2] else ()) for s in STRATEGIES],
)
@pytest.mark.parametrize("folder", RELEASES)
def test_bytes_and_scales_are_those_that_modules_compute_with(folder: Path, strategy: str) -> None:
    run_te(folder, _exported, 2, strategy, timeout=900)
