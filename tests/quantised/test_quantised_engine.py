"""The engine with quantised weights in one process: races, guards, when what is quantised, launches
and bytes."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine import gather, quantisation, saved
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.engine.partition import partition
from megatron_fsdp_adapter.core.engine.unit import Phase
from megatron_fsdp_adapter.core.layout import Use
from megatron_fsdp_adapter.core.runtime.device import COMPUTE, HostRuntime, storage_bytes
from megatron_fsdp_adapter.diagnostics.description import param_rows
from megatron_fsdp_adapter.diagnostics.memory import (
    LIFE,
    OPTIMIZER_STATE,
    PERSISTENT,
    Precision,
    group_bytes,
)
from megatron_fsdp_adapter.sharding.agreement import model_lines
from tests.engine.engine_cases import (
    LateCommunicator,
    Rig,
    Setup,
    build,
    domains_of,
    make_net,
    pretended_world,
    units_of,
)
from tests.engine.engine_scenarios import SCENARIOS, VARIANTS
from tests.engine.recording import RaceError, RecordingRuntime
from tests.engine.traces import collectives, steady
from tests.quantised.emulated import RECIPES, EmulatedParams, EmulatedTensor, format_of
from tests.quantised.quantised_cases import PlainQuantisedRig

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
            SCENARIOS[scenario](rig)
        return rig


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_access_is_ordered(strategy, recipe):
    for scenario in RACES:
        run(Setup(strategy, recipe=recipe), scenario)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_access_is_ordered_in_all_scenarios(strategy, recipe):
    for scenario in SCENARIOS:
        run(Setup(strategy, recipe=recipe), scenario)


LONG = ("selective", "slots", "two_domains", "far_prefetch", "reentrant", "shared_instances")


@pytest.mark.parametrize(
    "variant", [pytest.param(one, marks=pytest.mark.full if one in LONG else ()) for one in CHANGED]
)
def test_every_access_is_ordered_in_variants(variant):
    for strategy, recipe in ((ZERO_1, "block128"), (ZERO_3, "mxfp8")):
        for scenario in ("microbatches", "evaluation_between"):
            run(Setup(strategy, recipe=recipe, **VARIANTS[variant]), scenario)


class Deaf(RecordingRuntime):
    """Does not let compute wait for gathers, or gathers for compute, in a function of `module`."""

    def __init__(self, module: Any, function: str) -> None:
        super().__init__()
        self.place, self.missed = (module.__file__, function), 0

    def wait(self, role: str, event: Any) -> None:
        code = sys._getframe(1).f_code
        if (code.co_filename, code.co_name) == self.place:
            self.missed += 1
        else:
            super().wait(role, event)


@pytest.mark.parametrize(
    ("module", "function"),
    [(quantisation, "catch_up"), (gather, "follow_compute"), (gather, "_finish"),
     (gather, "_drop")],
)  # fmt: skip
def test_each_wait_is_needed_and_missed(module, function):
    """Of the quantisation, that for gathers is: a backward gathers while main weights are shown."""
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
            SCENARIOS[scenario](rig)
            found = rig.weights()
        plain = PlainQuantisedRig(setup, rolls=False)
        SCENARIOS[scenario](plain)
        for name, value in plain.weights().items():
            assert torch.equal(found[name], value), (scenario, name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_of_the_users_own_may_write_without_saying_so(strategy):
    setup = Setup(strategy, world=1, dtype=torch.float32, recipe="current")
    plain = PlainQuantisedRig(setup)
    SCENARIOS["weights_written"](plain)
    for own, same in ((True, True), (False, False)):
        with pretended_world(1):
            rig = build(setup, HostRuntime(), LateCommunicator)
            rig.engine.own_loop = own
            SCENARIOS["weights_written"](rig)
            found = rig.weights()
        expected = plain.weights()
        assert all(torch.equal(found[name], expected[name]) for name in expected) is same


# When.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_quantised_once_after_each_change_and_at_no_other_time(world, strategy):
    rig = build(Setup(strategy, recipe="block128"))

    def finished() -> int:
        count, rig.quantised.finished = rig.quantised.finished, 0
        return count

    assert finished() == 0, "what was wrapped is taken over"
    rig.evaluate()
    assert finished() == 0
    rig.step(microbatches=3)
    assert finished() == 1
    rig.evaluate()
    rig.engine.gather.invalidate()
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
    assert finished() == 1, "raw parameters are shown: there will be no better time"
    rig.zero()
    rig.forward_backward(1)
    rig.finish()
    rig.engine.quantisation.at_once = True
    rig.optimizer_step()
    assert finished() == 1, "a graph may be replayed before anything of ours is called again"
    rig.sync(wait=True)
    assert finished() == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_wrapped_stays_as_it_was_until_the_first_step(world, strategy, monkeypatch):
    """Whoever made the bytes may have made them of other values than main weights begin as."""
    original = EmulatedParams.high_precision
    monkeypatch.setattr(
        EmulatedParams, "high_precision", lambda self, param: original(self, param) * 1.5
    )
    rig = build(Setup(strategy, recipe="block128"))
    before = dict(make_net(rig.setup).named_parameters())
    rig.evaluate()
    rig.zero()
    rig.loss().backward()
    rig.engine.gather.gather_all()
    for pair in rig.engine.pairs:
        if isinstance(pair.raw, EmulatedTensor):
            name = pair.managed.fqns[0]
            assert torch.equal(pair.raw.dequantize(), before[name].dequantize()), name
            rows = pair.group.held.layout.shard_range(pair.index, pair.group.held.rank)
            value = before[name]._high_precision_init_val.float() * 1.5  # type: ignore[attr-defined]
            main = pair.group.main_items[pair.index]
            torch.testing.assert_close(
                main.reshape(-1), value.reshape(-1)[rows.start : rows.stop], rtol=1e-2, atol=0
            )


def test_frozen_weights_are_quantised_when_they_are_loaded(world):
    """What they stand for, rounded, is their main weight: every step would change them a little."""
    rig = build(Setup(recipe="current", frozen=True))
    rig.step()
    once = rig.quantised.finished
    rig.step()
    assert rig.quantised.finished == 2 * once == 2
    rig.write()
    rig.engine.main_weights_changed(loaded=True)
    rig.sync(wait=False)
    assert rig.quantised.finished == 4, "those that are trained, and the others"


def test_main_weights_are_what_bytes_stand_for_where_nothing_else_was_kept(world, monkeypatch):
    monkeypatch.setattr(EmulatedParams, "high_precision", lambda self, param: None)
    rig = build(Setup("no_shard", recipe="block128", dtype=torch.float32))
    for name, param in make_net(rig.setup).named_parameters():
        value = param.dequantize() if isinstance(param, EmulatedTensor) else param
        assert torch.equal(rig.weights()[name], value)


# Launches.


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_units_are_gathered_in_as_many_launches_as_plain_ones(strategy, recipe):
    """Norms and biases in the launch of the bytes. Weights that exist by direction are gathered
    once more where a unit is kept from forward to backward."""
    plain = collectives(steady(Setup(strategy), microbatches=2))
    mixed = collectives(steady(Setup(strategy, recipe=recipe), microbatches=2))
    found: Counter[str] = Counter()
    for name, count in mixed.items():
        kind, *groups = name.split()
        assert {group.partition("#")[0] for group in groups} == {groups[0]}, "one unit"
        found[f"{kind} {groups[0]}"] += count
    more = found - plain
    assert not plain - found
    assert all("all_gather" in name for name in more)
    assert not more or (recipe == "mxfp8" and strategy == ZERO_3)


def gathered_planes(rig: Rig) -> list[tuple[str, list[str]]]:
    """Of each gather, the unit of the first tensor and the planes."""
    names = {}
    for unit in rig.engine.units:
        for group in unit.groups:
            for plane in group.planes:
                for output, _ in plane.gather_pairs:
                    names[id(output)] = (unit.name, plane.plane.name)
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
def test_forward_gathers_rows_and_backward_columns(world, recompute):
    rig = build(Setup(recipe="mxfp8", recompute=recompute))
    rig.step(sync=False)
    found = gathered_planes(rig)
    rig.zero()
    rig.loss().backward()
    layers = [planes for unit, planes in found if unit == "layers.1"]
    rows = ["rowwise", "rowwise_scales", "weight"]
    columns = ["columnwise", "columnwise_scales", "weight"]
    both = sorted({*rows, *columns})
    if recompute == "selective":
        assert layers == [rows, both]
    elif recompute is None:
        assert layers == [rows, columns]
    else:
        assert layers == [rows, columns, rows[:2]], "what is there already is not written again"
    uses = Counter(rig.quantised.uses)
    assert uses[Use.FORWARD] and uses[Use.BOTH if recompute == "selective" else Use.BACKWARD]


def test_maxima_are_one_reduction_a_domain_and_axis():
    """However many weights there are, and of how many units."""
    setup = Setup(recipe="block128", split=True, outer=2, shard_outer=True, world=8, rank=6)
    with pretended_world(8, 6):
        rig = build(setup)
        reduced: list[tuple[int, int]] = []
        gathers = rig.engine.gather
        for axis in (*gathers.communicators.values(), *gathers.outer.values()):
            axis.all_max = lambda vector, axis=axis: reduced.append((axis.size, vector.numel()))  # type: ignore[attr-defined, method-assign]
        rig.load()
        rig.sync(wait=True)
    assert sorted(reduced) == [(2, 4), (2, 4), (2, 4), (4, 4)], "maps of 4 layers a domain"


# Guards.

READS = {
    "field": lambda param: param._rowwise_data,
    "dequantise": lambda param: param.dequantize(),
    "sum": lambda param: param + 1,
    "usage": lambda param: param.update_usage(rowwise_usage=True),
    "copy": lambda param: param.clone(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reading_a_weight_that_is_not_there_names_it(world, strategy, read):
    """Kept weights, too, between a step and their gather."""
    rig = build(Setup(strategy, recipe="block128"))
    rig.step(sync=False)
    rig.engine.show_raw_params()
    with pytest.raises(RuntimeError, match=r"layers.1.up.weight of unit layers.1.*phase SHARDED"):
        READS[read](rig.model.layers[1].up.weight)


def test_what_says_nothing_about_values_can_be_read(world):
    rig = build(Setup(recipe="mxfp8"))
    rig.engine.show_raw_params()
    weight = rig.model.layers[1].up.weight
    assert weight.shape == (96, 32) and weight.numel() == 96 * 32 and weight.is_leaf
    assert weight.dtype == torch.bfloat16 and weight.device == torch.device("cpu")
    assert weight.requires_grad and weight.grad is None and "layers.1.up.weight" in repr(weight)
    assert isinstance(weight, nn.Parameter) and isinstance(weight, EmulatedTensor)


def test_in_forward_and_backward_a_weight_is_of_its_own_class(world):
    rig = build(Setup(recipe="current"))
    seen = []
    up = rig.model.layers[1].up
    up.register_forward_hook(lambda module, *_: seen.append(type(module.weight)))
    rig.loss().backward()
    assert seen == [EmulatedTensor]
    assert type(up.weight) is not EmulatedTensor, "and another one after it"
    pair = next(p for p in rig.engine.pairs if p.managed.fqns == ("layers.1.up.weight",))
    classes = {type(p.raw) for p in rig.engine.pairs if isinstance(p.raw, EmulatedTensor)}
    assert len(classes) == 1 and type(pair.raw) in classes, "one guard for all of a class"


# What is derived.


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transposes_are_made_in_backward_and_dropped_behind_it(world, strategy, keep):
    if keep and STRATEGIES[strategy].shard_weights:
        with pytest.raises(ValueError, match="keep_derived=True with optim_grads_params"):
            Setup(strategy, recipe="current", keep_derived=True).config  # noqa: B018
        return
    rig = build(Setup(strategy, recipe="current", keep_derived=keep))
    rig.step()
    weight = next(p.raw for p in rig.engine.pairs if p.managed.fqns == ("layers.2.up.weight",))
    seen = []

    def derived() -> bool:
        return weight.__dict__["_columnwise_data"] is not None

    rig.model.layers[2].up.register_forward_hook(lambda *_: seen.append(derived()))
    rig.zero()
    rig.last(False)
    rig.loss().backward()
    assert derived() is keep and seen == [False], "not in forward"
    rig.last(True)
    rig.loss().backward()
    assert seen == [False, keep]
    rig.finish()
    rig.optimizer_step()
    assert not derived(), "of old weights"


# Bytes.


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_live_storages_are_those_of_the_formula(strategy, recipe):
    with pretended_world(4, 2):
        rig = build(Setup(strategy, recipe=recipe, world=4, rank=2, layers=2))
        row, precision = STRATEGIES[strategy], Precision(state_bytes=0)
        by_group = [group_bytes(g.layout, row, precision, 2) for g in rig.engine.groups]
        rig.step(sync=False)
        rig.zero()
        rig.engine.gather.release_all()
        expected = sum(
            count for held in by_group for kind, count in held.items()
            if LIFE[kind] == PERSISTENT and kind != OPTIMIZER_STATE
        )  # fmt: skip
        assert live_bytes(rig) == expected
        for use in (Use.FORWARD, Use.BACKWARD) if row.shard_weights else ():
            unit = rig.engine.units[1]
            rig.engine.show_raw_params()
            rig.engine.gather.need(unit, use)
            gathered = sum(held.get("gathered weights", 0) for held in by_unit(rig, unit, by_group))
            present = {u.name for u in rig.engine.units if u.phase is not Phase.SHARDED}
            for other in rig.engine.units:
                if other is not unit:
                    rig.engine.gather.release(other)
            assert live_bytes(rig) == expected + gathered, (use, present)
            rig.engine.gather.release_all()


def by_unit(rig: Rig, unit: Any, by_group: list[dict[str, int]]) -> list[dict[str, int]]:
    return [by_group[rig.engine.groups.index(group)] for group in unit.groups]


def live_bytes(rig: Rig) -> int:
    """Of all flat buffers of all groups, each storage once."""
    found = {}
    for group in rig.engine.groups:
        flats = [f for plane in group.planes for f in plane.buffers]
        flats += [group.main.tensor, *(
            (group.grad.tensor, group.bucket.tensor) if group.key.requires_grad else ())]
        for flat in flats:
            found[flat.untyped_storage()._cdata] = storage_bytes(flat)
    return sum(found.values())


def test_autograd_keeps_the_parameter_and_no_copy_of_it(world, monkeypatch):
    """What backward reads of a weight is in the unit's buffers, which hooks are not shown."""
    monkeypatch.setattr(saved, "is_owned", lambda value: False)
    rig = build(Setup(recipe="current"))
    kept: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        rig.loss()
    weights = [value for value in kept if isinstance(value, EmulatedTensor)]
    assert len(weights) == 8
    raw = {id(pair.raw) for pair in rig.engine.pairs}
    assert all(id(value) in raw for value in weights)
    assert not [v for v in kept if v.shape[-2:] in ((96, 32), (32, 96)) and type(v) is torch.Tensor]


# Refusals.


def test_quantised_weights_that_nobody_knows_are_refused(world):
    setup = Setup(recipe="current")
    model = make_net(setup)
    plans = partition(model, units_of(model), domain_of=lambda *_: "dense", format_of=format_of)
    with pytest.raises(ValueError, match=r"quantised=None.*per_tensor"):
        FsdpEngine(model, plans, domains_of(setup), setup.config, HostRuntime())


def test_quantising_runs_on_the_compute_stream(world, monkeypatch):
    rig = build(Setup(recipe="current"))
    roles = []
    original = RecordingRuntime.submit
    monkeypatch.setattr(
        RecordingRuntime, "submit",
        lambda self, role, *tasks: (roles.append(role), original(self, role, *tasks))[1],
    )
    rig.load()
    rig.engine.show_raw_params()
    assert roles[0] == COMPUTE


def test_ranks_compare_formats_and_buffers_say_which_plane_they_are(world):
    setup = Setup(recipe="mxfp8")
    model = make_net(setup)
    plans = partition(model, units_of(model), domain_of=lambda *_: "dense", format_of=format_of)
    lines = [line for line in model_lines(plans, setup.config) if "layers.0.up" in line]
    assert any("up.weight (96, 32) bfloat16 as mxfp8 trained" in line for line in lines)
    assert any("up.bias (96,) bfloat16 trained" in line for line in lines)
    engine = build(setup).engine
    dtypes = {row.name: row.dtype for row in param_rows(engine)}
    assert dtypes["layers.0.up.weight"] == "bfloat16 as mxfp8"
    assert dtypes["layers.0.up.bias"] == "bfloat16"
    labels = {full.label for group in engine.groups for full in group.weights}
    assert "the gathered weights (columnwise_scales) of unit layers.1" in labels
    assert "the gathered weights of unit layers.1" in labels
