"""The engine with quantized weights in one process: races, values, when what is quantized, and
launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine import gather
from megatron_fsdp_adapter.core.engine.unit import Phase
from megatron_fsdp_adapter.core.runtime.device import HostRuntime, storage_bytes
from megatron_fsdp_adapter.quantized import weights
from tests.engine.engine_cases import Rig, Setup, build, make_net
from tests.engine.pretended import LateCommunicator, pretended_world
from tests.engine.recording import RaceError, RecordingRuntime, who_asks
from tests.engine.scenarios import EVENTS, ONE_AFTER_ANOTHER, SCENARIOS
from tests.engine.traces import collectives, steady
from tests.quantized.emulated import PLANES, RECIPES, CountingParams, EmulatedTensor
from tests.quantized.quantized_cases import PlainQuantizedRig

ZERO_1, ZERO_3 = "optim", "optim_grads_params"


@pytest.fixture
def world():
    with pretended_world(2):
        yield


# Races.

RACES = ("microbatches", "evaluation_between", "layer_twice", "backward_raises", "weights_loaded")
CHANGED = ("tied", "frozen", "reentrant", "non_reentrant", "selective", "far_prefetch", "slots",
           "two_domains", "two_instances", "shared_instances", "slots_recompute")  # fmt: skip


def run(setup: Setup, scenario: str, runtime: Any = None) -> Rig:
    with pretended_world(setup.world, setup.rank):
        rig = build(setup, runtime)
        with rig.watch():
            EVENTS[scenario](rig)
        return rig


@pytest.mark.parametrize(
    ("strategy", "recipe"),
    [(s, r) for s in STRATEGIES for r in RECIPES if s == ZERO_3 or r in ("current", "mxfp8")],
)
def test_every_access_is_ordered(strategy, recipe):
    for scenario in RACES:
        run(Setup(strategy, recipe=recipe), scenario)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_access_is_ordered_in_all_scenarios(strategy, recipe):
    for scenario in ONE_AFTER_ANOTHER:
        run(Setup(strategy, recipe=recipe), scenario)


LONG = ("selective", "slots", "two_domains", "far_prefetch", "reentrant", "shared_instances")


@pytest.mark.parametrize(
    "variant", [pytest.param(one, marks=pytest.mark.full if one in LONG else ()) for one in CHANGED]
)
def test_every_access_is_ordered_in_variants(variant):
    for strategy, recipe, scenarios in (
        (ZERO_1, "block128", RACES[:2]), (ZERO_3, "mxfp8", RACES[:2]),
        (ZERO_3, "current", RACES[:1]),
    ):  # fmt: skip
        for scenario in scenarios:
            run(Setup(strategy, recipe=recipe, **SCENARIOS[variant].options), scenario)


class Deaf(RecordingRuntime):
    """Does not let compute wait for gathers, or gathers for compute, in a function of `module`."""

    def __init__(self, module: Any, function: str) -> None:
        super().__init__()
        self.place, self.missed = (module.__file__, function), 0

    def wait(self, role: str, event: Any) -> None:
        code = who_asks().f_code
        if (code.co_filename, code.co_name) == self.place:
            self.missed += 1
        else:
            super().wait(role, event)


@pytest.mark.parametrize(
    ("module", "function"),
    [(weights, "catch_up"), (gather, "follow_compute"), (gather, "_finish"),
     (gather, "_drop")],
)  # fmt: skip
def test_each_wait_is_needed_and_missed(module, function):
    """Of the quantization, that for gathers is: a backward gathers while main weights are shown."""
    deaf = Deaf(module, function)
    with pretended_world(2), pytest.raises(RaceError, match="without waiting for"):
        rig = build(Setup(recipe="mxfp8"), deaf)
        with rig.watch():
            rig.step()
            if function == "catch_up":
                gathers_while_main_weights_are_shown(rig)
            rig.step()
    assert deaf.missed


def gathers_while_main_weights_are_shown(rig: Rig) -> None:
    rig.zero()
    loss = rig.loss()
    rig.weights()
    loss.backward()
    if rig.engine.units[2].phase is Phase.SHARDED:
        rig.engine.gather.launch(rig.engine.units[2])
    rig.engine.main_weights_changed()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gathers_while_main_weights_are_shown_are_ordered(world, strategy):
    rig = build(Setup(strategy, recipe="mxfp8"))
    with rig.watch():
        rig.step()
        gathers_while_main_weights_are_shown(rig)
        rig.step()


# Values, on the slowest network there can be.


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_equal_those_of_a_plain_model(strategy, recipe):
    setup = Setup(strategy, world=1, dtype=torch.float32, recipe=recipe)
    for scenario in ("steps", "evaluation_between", "weights_loaded", "backward_raises"):
        with pretended_world(1):
            rig = build(setup, HostRuntime(), LateCommunicator)
            EVENTS[scenario](rig)
            found = rig.weights()
        plain = PlainQuantizedRig(setup, rolls=False)
        EVENTS[scenario](plain)
        for name, value in plain.weights().items():
            assert torch.equal(found[name], value), (scenario, name)


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_stay_whole_are_made_once(world, strategy):
    rig = build(Setup(strategy, recipe="current"))
    rig.step(microbatches=3)
    made_at_gather = strategy == "optim_grads_params"
    assert bool(rig.quantized.written) == made_at_gather


def test_frozen_weights_are_kept(world):
    """What they stand for is their main weight, which rounds to other scales than they have."""
    rig = build(Setup(ZERO_3, recipe="current", frozen=True))
    rig.engine.gather.reshard_all()
    frozen = [s for g in rig.engine.groups if g.key.quantized and not g.key.requires_grad
              for s in g.weight_shards]  # fmt: skip
    assert frozen and all(storage_bytes(shard.tensor) for shard in frozen)


def test_scales_are_made_once_after_each_change(world):
    rig = build(Setup(ZERO_3, recipe="delayed"))
    rig.step(microbatches=3)
    assert rig.quantized.finished == 2, "before the first forward, and after the step"
    written = rig.quantized.written
    rig.evaluate()
    rig.evaluate()
    assert rig.quantized.finished == 2
    rig.engine.gather.mark_stale()
    rig.evaluate()
    assert rig.quantized.finished == 2 and rig.quantized.written > written


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
