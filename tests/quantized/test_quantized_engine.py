"""The engine with quantized weights in one process: when what is quantized, and launches. Order and
values: the rows of recipes in `tests/engine/scenarios.py`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.device import HostRuntime, storage_bytes
from tests.engine.engine_cases import Rig, build
from tests.engine.pretended import LateCommunicator, pretended_world
from tests.engine.scenarios import EVENTS
from tests.engine.small_model import Setup, make_net
from tests.engine.traces import collectives, steady
from tests.quantized.emulated import PLANES, RECIPES, CountingParams, EmulatedTensor
from tests.quantized.quantized_cases import PlainQuantizedRig

ZERO_1, ZERO_3 = "optim", "optim_grads_params"


@pytest.fixture
def world():
    with pretended_world(2):
        yield


# Values, on the slowest network there can be.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_of_the_users_own_may_write_without_saying_so(strategy):
    setup = Setup(strategy, world=1, dtype=torch.float32, recipe="current")
    plain = PlainQuantizedRig(setup)
    EVENTS["weights_written"](plain)
    for own, same in ((True, True), (False, False)):
        with pretended_world(1):
            rig = build(setup, HostRuntime(), LateCommunicator)
            rig.engine.quantization.unnotified = own
            EVENTS["weights_written"](rig)
            found = rig.weights()
        expected = plain.weights()
        assert all(torch.equal(found[name], expected[name]) for name in expected) is same


# When.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_quantized_once_after_each_change_and_at_no_other_time(world, strategy):
    rig = build(Setup(strategy, recipe="block128"))

    def finished() -> int:
        count, rig.quantized.finished = rig.quantized.finished, 0
        return count

    assert finished() == 0
    rig.evaluate()
    kept = strategy != "optim_grads_params"
    assert finished() == (not kept), "what was wrapped is taken over where it is kept"
    rig.step(microbatches=3)
    assert finished() == 1
    rig.evaluate()
    rig.engine.gather.mark_stale()
    rig.evaluate()
    rig.weights()
    rig.evaluate()
    assert finished() == 0, "nothing has changed"
    rig.zero()
    rig.forward_backward(2)
    rig.finish()
    rig.sync(wait=True)
    assert finished() == 0, "a step that was skipped"
    rig.finish()
    rig.optimizer_step()
    rig.load()
    assert finished() == 0, "nobody needs it yet"
    rig.sync(wait=True)
    assert finished() == 1, "two changes, one use"
    rig.engine.main_weights_changed()
    assert finished() == 1, "unsharded parameters are shown: there will be no better time"
    rig.zero()
    rig.forward_backward(1)
    rig.finish()
    rig.engine.quantization.at_once = True
    rig.optimizer_step()
    assert finished() == 1, "a graph may be replayed before anything of ours is called again"
    rig.sync(wait=True)
    assert finished() == 0


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_what_was_wrapped_stays_as_it_was_until_the_first_step(world, strategy, monkeypatch):
    """Whoever made the bytes may have made them of other values than main weights begin as. ZeRO-3
    does not keep bytes: it casts main weights at the first gather."""
    original = CountingParams.high_precision
    monkeypatch.setattr(
        CountingParams, "high_precision", lambda self, param: original(self, param) * 1.5
    )
    rig = build(Setup(strategy, recipe="block128"))
    before = dict(make_net(rig.setup).named_parameters())
    rig.evaluate()
    rig.zero()
    rig.loss().backward()
    rig.engine.gather.unshard_all()
    for pair in rig.engine.pairs:
        if isinstance(pair.unsharded, EmulatedTensor):
            name = pair.managed.fqns[0]
            assert torch.equal(pair.unsharded.dequantize(), before[name].dequantize()), name
            rows = pair.group.held.range(pair.index)
            value = before[name]._high_precision_init_val.float() * 1.5  # type: ignore[attr-defined]
            main = pair.group.main.items(pair.group.held)[pair.index]
            torch.testing.assert_close(
                main.reshape(-1), value.reshape(-1)[rows.start : rows.stop], rtol=1e-2, atol=0
            )


def test_frozen_weights_are_quantized_when_they_are_loaded(world):
    """What they stand for, rounded, is their main weight: every step would change them a little."""
    rig = build(Setup(recipe="current", frozen=True))
    rig.step()
    once = rig.quantized.finished
    rig.step()
    assert (once, rig.quantized.finished) == (2, 3), "before the first forward, and after steps"
    rig.write()
    rig.engine.main_weights_changed(loaded=True)
    rig.sync(wait=False)
    assert rig.quantized.finished == 5, "those that are trained, and the others"


def test_main_weights_are_what_bytes_stand_for_where_nothing_else_was_kept(world, monkeypatch):
    monkeypatch.setattr(CountingParams, "high_precision", lambda self, param: None)
    rig = build(Setup("no_shard", recipe="block128", dtype=torch.float32))
    for name, param in make_net(rig.setup).named_parameters():
        value = param.dequantize() if isinstance(param, EmulatedTensor) else param
        assert torch.equal(rig.weights()[name], value)


# Trained weights under ZeRO-3: cast at every gather, with scales that are made once.


def quantized_shards(rig: Rig) -> list:
    return [s for g in rig.engine.groups if g.key.quantized for s in g.weight_shards]


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_of_formats_with_columns_are_kept_and_no_others(world, recipe):
    rig = build(Setup(ZERO_3, recipe=recipe))
    rig.step()
    rig.engine.gather.reshard_all()
    held = sum(storage_bytes(shard.tensor) for shard in quantized_shards(rig))
    assert bool(held) == (recipe == "mxfp8")


def test_frozen_weights_are_kept(world):
    """What they stand for is their main weight, which rounds to other scales than they have."""
    rig = build(Setup(ZERO_3, recipe="current", frozen=True))
    rig.engine.gather.reshard_all()
    frozen = [s for g in rig.engine.groups if g.key.quantized and not g.key.requires_grad
              for s in g.weight_shards]  # fmt: skip
    assert frozen and all(storage_bytes(shard.tensor) for shard in frozen)


# Launches.


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_units_are_gathered_in_as_many_launches_as_plain_ones(strategy, recipe):
    """Norms and biases in the launch of the bytes."""
    plain = collectives(steady(Setup(strategy), microbatches=2))
    mixed = collectives(steady(Setup(strategy, recipe=recipe), microbatches=2))
    found: Counter[str] = Counter()
    for name, count in mixed.items():
        kind, *groups = name.split()
        assert {group.partition("#")[0] for group in groups} == {groups[0]}, "one unit"
        found[f"{kind} {groups[0]}"] += count
    assert found == plain


def gathered_planes(rig: Rig) -> list[tuple[str, list[str]]]:
    """Of each gather, the unit of the first tensor and the planes."""
    names = {}
    for unit in rig.engine.units:
        for group in unit.groups:
            for full in group.weights:
                for output in full.segments(group.full):
                    names[id(output)] = (unit.name, full.plane.name)
    found = []
    for communicator in rig.engine.gather.communicators.values():
        original = communicator.all_gather

        def all_gather(pairs: Any, original: Any = original) -> Any:
            told = [names[id(output)] for output, _ in pairs]
            found.append((told[0][0], sorted({name for _, name in told})))
            return original(pairs)

        communicator.all_gather = all_gather  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("recompute", [None, "non_reentrant", "selective"])
def test_forward_and_backward_gather_rows_and_columns(world, recompute):
    rig = build(Setup(recipe="mxfp8", recompute=recompute))
    rig.step(sync=False)
    found = gathered_planes(rig)
    rig.zero()
    rig.loss().backward()
    layers = [planes for unit, planes in found if unit == "layers.1"]
    assert layers == [sorted({*PLANES, "weight"})] * 2, "gathered planes are not gathered again"


def test_maxima_are_one_reduction_a_domain_and_axis():
    """However many weights there are, and of how many units."""
    setup = Setup(recipe="block128", split=True, outer=2, shard_outer=True, world=8, rank=6)
    with pretended_world(8, 6):
        rig = build(setup)
        reduced: list[tuple[int, int]] = []
        gathers = rig.engine.gather
        for axis in (*gathers.communicators.values(), *gathers.outer.values()):
            axis.all_reduce_max = lambda vector, axis=axis: reduced.append(
                (axis.size, vector.numel())
            )  # type: ignore[attr-defined, method-assign]
        rig.load()
        rig.sync(wait=True)
    assert sorted(reduced) == [(2, 16), (2, 16), (2, 16), (4, 16)], "padded maps of 4 layers"
