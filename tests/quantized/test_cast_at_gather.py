"""Trained quantized weights under ZeRO-3: cast at every gather, with scales that are made once."""

from __future__ import annotations

import pytest

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.device import storage_bytes
from tests.engine.engine_cases import Rig, Setup, build
from tests.engine.pretended import pretended_world
from tests.engine.scenarios import EVENTS, SCENARIOS
from tests.quantized.emulated import RECIPES

MADE = [name for name, format in RECIPES.items() if not format.has_columns]
CHANGED = ("tied", "slots", "non_reentrant", "far_prefetch", "two_domains")


def case(recipe: str, **options: object) -> Setup:
    return Setup("optim_grads_params", recipe=recipe, **options)  # type: ignore[arg-type]


def quantized_planes(rig: Rig) -> list:
    return [p for g in rig.engine.groups if g.key.quantized for p in g.planes]


@pytest.fixture
def world():
    with pretended_world(2):
        yield


@pytest.mark.parametrize("recipe", MADE)
def test_every_access_is_ordered(world, recipe):
    for scenario in ("microbatches", "evaluation_between", "backward_raises", "weights_loaded"):
        rig = build(case(recipe))
        with rig.watch():
            EVENTS[scenario](rig)


@pytest.mark.parametrize("variant", CHANGED)
def test_every_access_is_ordered_in_variants(variant):
    setup = case("current", **SCENARIOS[variant].options)
    with pretended_world(setup.world, setup.rank):
        rig = build(setup)
        with rig.watch():
            EVENTS["microbatches"](rig)


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_of_formats_with_columns_are_kept_and_no_others(world, recipe):
    rig = build(case(recipe))
    rig.step()
    rig.engine.gather.release_all()
    held = sum(storage_bytes(plane.shard.tensor) for plane in quantized_planes(rig))
    assert bool(held) == (recipe == "mxfp8")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_stay_whole_are_made_once(world, strategy):
    rig = build(case("current").but(strategy=strategy))
    rig.step(microbatches=3)
    made_at_gather = strategy == "optim_grads_params"
    assert bool(rig.quantized.written) == made_at_gather


def test_frozen_weights_are_kept(world):
    """What they stand for is their main weight, which rounds to other scales than they have."""
    rig = build(case("current", frozen=True))
    rig.engine.gather.release_all()
    frozen = [p.shard for g in rig.engine.groups if g.key.quantized and not g.key.requires_grad
              for p in g.planes]  # fmt: skip
    assert frozen and all(storage_bytes(shard.tensor) for shard in frozen)


def test_scales_are_made_once_after_each_change(world):
    rig = build(case("delayed"))
    rig.step(microbatches=3)
    assert rig.quantized.finished == 2, "before the first forward, and after the step"
    written = rig.quantized.written
    rig.evaluate()
    rig.evaluate()
    assert rig.quantized.finished == 2
    rig.engine.gather.invalidate()
    rig.evaluate()
    assert rig.quantized.finished == 2 and rig.quantized.written > written
