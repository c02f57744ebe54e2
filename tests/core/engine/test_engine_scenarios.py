"""The questions about weights, order, memory, host calls and recovery, over all scenarios.

`HostRuntime` with collectives that happen only when they are waited for defers as much as it ever
can: a wait that is missing, or a deferred task that reads what has changed meanwhile, gives other
weights.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_fsdp_adapter
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.lib.engine.engine_cases import Rig, build, built, profiled_pass
from tests.lib.engine.pretended import LateCommunicator, PretendCommunicator, pretended_world
from tests.lib.engine.recording import RaceError, RecordingRuntime
from tests.lib.engine.scenarios import (
    EVENTS,
    FP32,
    ONE_AFTER_ANOTHER,
    SCENARIOS,
    SHARDED,
    ZERO_1,
    ZERO_2,
    ZERO_3,
    cells,
)
from tests.lib.engine.side_streams import KINDS, SIDE
from tests.lib.engine.small_model import Exploded, Loop, Setup
from tests.lib.engine.traces import alive, steady
from tests.lib.quantized.quantized_cases import PlainQuantizedRig

CHECKS = (
    "core/engine/engine.py",
    "core/engine/step.py",
    "core/engine/gather.py",
    "core/engine/reduce.py",
    "core/engine/reduction.py",
    "core/engine/hooks.py",
    "core/engine/unit.py",
    "core/engine/group.py",
    "core/engine/wgrad.py",
)

PACKAGE = str(Path(megatron_fsdp_adapter.__file__).parent)
OF_TORCH = ("TensorBase.", "_VariableFunctionsClass.")
Weights = dict[str, torch.Tensor]


def ended(setup: Setup, event: str, communicator: Any = PretendCommunicator) -> Weights:
    """Weights, and what the model then gives."""
    if setup.side is None:
        runtime = HostRuntime()
    else:
        runtime = RecordingRuntime(SIDE)
    with built(setup, runtime, communicator) as rig:
        EVENTS[event](rig)
        return rig.weights() | {"output": rig.evaluate()}


def watched(setup: Setup, event: str, runtime: Any = None) -> Rig:
    with built(setup, runtime) as rig, rig.watch():
        EVENTS[event](rig)
        rig.engine.to_sharded()
    return rig


@pytest.mark.parametrize(("strategy", "scenario"), cells())
def test_every_access_is_ordered(strategy, scenario):
    row = SCENARIOS[scenario]
    for event in row.events:
        watched(row.setup(strategy), event)


DTYPES = {"main_grads", "comm_dtype", "main_params", "dtype", "outer", "split_outer"}
SLOW = ("microbatches", "layers_skipped", "evaluation_between", "gradients_late", "kept", "whole")


@pytest.mark.parametrize(
    ("strategy", "scenario"),
    cells(*SLOW, *(n for n, row in SCENARIOS.items() if row.like or row.options.keys() & DTYPES)),
)
def test_values(strategy, scenario):
    """On the slowest network there can be, and with NaN in all memory that is handed out, weights
    have the bits of collectives that happen at once, whatever option that changes no bit is set."""
    row = SCENARIOS[scenario]
    for event in row.events:
        found = ended(row.setup(strategy, poison=True), event, LateCommunicator)
        setup = row.setup(strategy, poison=False)
        expected = ended(setup.but(**row.like), event)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value.isfinite().all() and torch.equal(found[name], value), (event, name)


@pytest.mark.parametrize(
    ("strategy", "scenario"),
    cells(
        *(
            name
            for name, row in SCENARIOS.items()
            if row.apart is not None
            and not row.options.keys() & {"comm_dtype", "main_grads", "outer", "split_outer"}
        )
    ),
)
def test_values_are_those_of_autograd_alone(strategy, scenario):
    row = SCENARIOS[scenario]
    setup = row.setup(strategy, world=1, rank=0, dtype=FP32)
    for event in row.events:
        if setup.recipe is None:
            plain = Loop(setup)
        else:
            plain = PlainQuantizedRig(setup, rolls=False)
        before = plain.weights()
        EVENTS[event](plain)
        expected, found = plain.weights(), ended(setup, event, LateCommunicator)
        assert any(not torch.equal(before[name], expected[name]) for name in expected)
        if event in row.apart:
            bound = {"rtol": 1e-6, "atol": 1e-7}
        else:
            bound = {"rtol": 0, "atol": 0}
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **bound)


BOUNDED = (*ONE_AFTER_ANOTHER, "tied", "many_layers", "reentrant", "selective", "far_prefetch",
           "joined", "two_domains", "kept", "scheduled", "dispatched", "offload")  # fmt: skip


@pytest.mark.parametrize(("strategy", "scenario"), cells(*BOUNDED, strategies=SHARDED))
def test_alive_bytes(strategy, scenario):
    """The root unit, the one that computes and the next one have weights; two have buckets."""
    row = SCENARIOS[scenario]
    for event in row.events:
        rig = watched(row.setup(strategy), event)
        weights = {unit.name: unit.weight_bytes for unit in rig.engine.units}
        root = {"root": weights.pop("root")}
        buckets = {
            unit.name: sum(group.grads.bucket.nbytes for group in unit.trainable_groups)
            for unit in rig.engine.units
        }
        for kind, sizes, units, besides in (
            ("weight", weights, 2 + row.weights, root),
            ("bucket", buckets, 2, {}),
        ):
            most = sum(sorted(sizes.values())[-units:]) + sum(besides.values())
            for now in alive(rig.runtime, kind):
                names = {name.split("#")[0] for name in now}
                assert len(names - besides.keys()) <= units, event
                assert sum(now.values()) <= most, event


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non_reentrant", "selective"])
def test_root_and_two_units_are_gathered_at_once(recompute, microbatches):
    """The bound above is met, by the two largest units in a row."""
    setup = Setup(ZERO_3, layers=5, recompute=recompute, width=1)
    rig = steady(setup, 2, microbatches=microbatches)
    sizes = {unit.name: unit.weight_bytes for unit in rig.engine.units}
    chain = [sizes[name] for name in ("embedding", *(f"layers.{i}" for i in range(5)), "head")]
    most = max(sum(units.values()) for units in alive(rig.runtime, "weight"))
    assert most == sizes["root"] + max(map(sum, pairwise(chain)))


@pytest.mark.parametrize("budget_units", [0, 1, 2, 3])
def test_prefetch_budget_is_in_bytes(budget_units):
    """Weights are gathered ahead until the budget is used up: one unit more than fits in it
    entirely, and at least one."""
    setup = Setup(ZERO_3, layers=6, tied=True)
    with pretended_world(2):
        layer = build(setup).engine.units[0].weight_bytes
    rig = steady(setup.but(prefetch_bytes=layer * budget_units), 2)
    most = max(len(units) for units in alive(rig.runtime, "weight"))
    assert most == 2 + max(budget_units, 1)


def step_cost(setup: Setup) -> Counter[str]:
    """What the package calls, by name, in two microbatches of a step that knows the order: its own
    functions, and torch's for tensors."""
    calls = Counter[str]()

    def profile(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            own = event == "call" and code.co_name[0] != "<"
            if own or (event == "c_call" and arg.__qualname__.startswith(OF_TORCH)):
                calls[code.co_name if own else arg.__qualname__] += 1

    profiled_pass(setup, profile)
    return calls


@pytest.mark.parametrize(
    ("strategy", "scenario"),
    cells(
        "steps",
        "no_overlap",
        "checked",
        "slots",
        "exchange",
        "fp32_sums",
        "two_domains",
        "two_instances",
        "whole",
        "kept",
        "overwrites",
        "scheduled",
        "offload",
    ),
)
def test_host_cost(strategy, scenario):
    """It is by unit and not by parameter."""
    few, many = (step_cost(SCENARIOS[scenario].setup(strategy, width=width)) for width in (0, 20))
    assert sum(many.values()) > 100
    assert not {name for name in few | many if few[name] != many[name]}


@pytest.mark.parametrize(
    ("strategy", "scenario"),
    cells(
        "steps",
        "tied",
        "no_overlap",
        "reentrant",
        "non_reentrant",
        "overwrites",
        "slots",
        "exchange",
        "two_domains",
        "two_instances",
        "whole",
        "kept",
        "joined",
        "offload",
        "dispatched",
        "current",
        "mxfp8",
    ),
)
def test_recovers(strategy, scenario):
    """From passes that raise, one of them the first of all: nothing is left of them when gradients
    are zeroed, and the steps between are those that they would have been."""
    setup = SCENARIOS[scenario].setup(strategy)

    def at_rest(rig: Rig) -> set[str]:
        rig.zero()
        rig.engine.to_sharded()
        rig.runtime.synchronize()
        assert all(pair.unsharded.grad is None for pair in rig.engine.pairs)
        return rig.allocated()

    found = []
    for raises in (False, True):
        with pretended_world(setup.world, setup.rank):
            if setup.side is None:
                runtime = HostRuntime()
            else:
                runtime = RecordingRuntime(SIDE)
            rig = build(setup, runtime, LateCommunicator)
            rest = None
            for explode in ("backward 1", "forward 2"):
                if raises:
                    rig.model.explode = explode
                    with pytest.raises(Exploded):
                        rig.loss().backward()
                    rig.model.explode = None
                    assert rest in (None, at_rest(rig))
                    rig.zero()
                rig.step(sync=False)
                rest = at_rest(rig)
            found.append(rig.weights())
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("shard_outer", [False, True], ids=["replicas", "parts"])
@pytest.mark.parametrize("strategy", [s for s, row in STRATEGIES.items() if row.shard_grads])
def test_with_an_outer_axis_every_microbatch_counts(strategy, shard_outer, told):
    """A step of three, after which the weights are those of a plain model. Untold: nothing says
    which is the last, as in Megatron without overlap, where `no_sync` is wired to nothing."""
    plain = Loop(Setup(strategy, dtype=FP32))
    plain.step(microbatches=3)
    ranks = []
    for rank in range(2):
        setup = Setup(strategy, rank=rank, dtype=FP32, outer=2, shard_outer=shard_outer, told=told)
        with built(setup, HostRuntime(), LateCommunicator) as rig:
            rig.step(microbatches=3)
            ranks.append(rig.weights())
    for name, expected in plain.weights().items():
        held = [rank[name] for rank in ranks if rank[name].numel()]
        whole = torch.cat(held) if shard_outer else held[1]
        assert torch.equal(whole.view_as(expected), expected), name


@pytest.mark.parametrize("strategy", [ZERO_1, ZERO_2])
def test_modules_that_decide_in_forward_overwrite_all_that_is_not_kept(strategy):
    """Gradients that are kept are not zeroed, as the first microbatch overwrites what is there, nor
    put aside, as the others add to it."""
    rig = steady(Setup(strategy, fused=WgradProtocol.OVERWRITES_EARLY), microbatches=3)
    done = {entry.op for entry in rig.runtime.log if entry.what == "layers.1.bucket"}
    assert "copy_" in done
    assert done.isdisjoint({"zero_", "clone"})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_models_on_one_runtime_are_ordered(strategy):
    """As with virtual pipeline stages: both wrappers share the device's streams."""
    with built(Setup(strategy, layers=2)) as one, one.watch():
        two = build(Setup(strategy, layers=3), one.runtime)
        for _ in range(2):
            for rig in (one, two):
                rig.zero()
            (one.loss(0) + two.loss(1)).backward()
            for rig in (two, one):
                rig.finish()
                rig.optimizer_step()
                rig.sync(wait=False)


@pytest.mark.parametrize("side", KINDS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("forgets", ["fork", "join"])
def test_a_layer_that_does_not_join_its_own_stream_is_a_race(side, forgets, direction):
    with pytest.raises(RaceError, match="without waiting for"):
        watched(Setup(ZERO_3, side=side, forgets=f"{forgets} in {direction}"), "steps")
