"""The engine with quantized weights in one process: when what is quantized, and launches. Order and
values: the rows of recipes in `tests/lib/engine/scenarios.py`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.lib.engine.engine_cases import build, built
from tests.lib.engine.pretended import LateCommunicator
from tests.lib.engine.scenarios import EVENTS
from tests.lib.engine.small_model import Setup, make_net
from tests.lib.engine.traces import collectives, steady
from tests.lib.quantized.emulated import RECIPES, CountingParams, EmulatedTensor
from tests.lib.quantized.quantized_cases import PlainQuantizedRig

CHECKS = ("quantized/weights.py", "core/engine/quantized.py")

# Values, on the slowest network there can be.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_of_the_users_own_may_write_without_saying_so(strategy):
    setup = Setup(strategy, world=1, dtype=torch.float32, recipe="current")
    plain = PlainQuantizedRig(setup)
    EVENTS["weights_written"](plain)
    for own, same in ((True, True), (False, False)):
        with built(setup, HostRuntime(), LateCommunicator) as rig:
            if own:
                rig.engine.quantization.expect_writes()
            EVENTS["weights_written"](rig)
            found = rig.weights()
        expected = plain.weights()
        assert all(torch.equal(found[name], expected[name]) for name in expected) is same


# When.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_quantized_once_after_each_change_and_at_no_other_time(two_ranks, strategy):
    rig = build(Setup(strategy, recipe="block128"))

    def expect(times: int, why: str) -> None:
        """So often all weights were quantized since this was asked before."""
        assert rig.quantized.finished == times, why
        rig.quantized.finished = 0

    rig.evaluate()
    kept = strategy != "optim_grads_params"
    expect(0 if kept else 1, "what was wrapped is taken over where it is kept")
    rig.step(3)
    expect(1, "a step")
    rig.evaluate()
    expect(0, "nothing has changed")
    rig.engine.gather.mark_stale()
    expect(0, "gathered weights are old, and no others")
    rig.evaluate()
    rig.weights()
    rig.evaluate()
    expect(0, "nothing has changed")
    rig.zero()
    rig.forward_backward(2)
    rig.finish()
    rig.sync(wait=True)
    expect(0, "a step that was skipped")
    rig.finish()
    rig.optimizer_step()
    rig.load()
    expect(0, "not needed yet")
    rig.sync(wait=True)
    expect(1, "two changes, one use")
    rig.engine.main_weights_changed()
    expect(1, "unsharded parameters are shown: there will be no better time")
    rig.zero()
    rig.forward_backward(1)
    rig.finish()
    expect(0, "nothing has changed")
    rig.engine.quantization.quantize_at_once()
    expect(0, "nothing has changed")
    rig.optimizer_step()
    expect(1, "a graph may be replayed before anything of ours is called again")
    rig.sync(wait=True)
    expect(0, "nothing has changed")


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_what_was_wrapped_stays_as_it_was_until_the_first_step(two_ranks, strategy, monkeypatch):
    """The bytes may have been made of other values than main weights begin as. ZeRO-3
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
            rows = pair.group.shards.held.range(pair.index)
            value = before[name]._high_precision_init_val.float() * 1.5  # type: ignore[attr-defined]
            main = pair.group.main.buffer.items(pair.group.shards.held)[pair.index]
            torch.testing.assert_close(
                main.reshape(-1), value.reshape(-1)[rows.start : rows.stop], rtol=1e-2, atol=0
            )


def test_frozen_weights_are_quantized_when_they_are_loaded(two_ranks):
    """What they stand for, rounded, is their main weight: every step would change them a little."""
    rig = build(Setup(recipe="current", frozen=True))
    rig.step()
    once = rig.quantized.finished
    rig.step()
    assert once == 2, "before the first forward, and after steps"
    assert rig.quantized.finished == 3, "before the first forward, and after steps"
    rig.write()
    rig.engine.main_weights_changed(loaded=True)
    rig.sync(wait=False)
    assert rig.quantized.finished == 5, "those that are trained, and the others"


def test_main_weights_are_what_bytes_stand_for_where_nothing_else_was_kept(two_ranks, monkeypatch):
    monkeypatch.setattr(CountingParams, "high_precision", lambda self, param: None)
    rig = build(Setup("no_shard", recipe="block128", dtype=torch.float32))
    for name, param in make_net(rig.setup).named_parameters():
        if isinstance(param, EmulatedTensor):
            value = param.dequantize()
        else:
            value = param
        assert torch.equal(rig.weights()[name], value)


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


def test_maxima_are_one_reduction_a_domain_and_axis():
    """However many weights there are, and of how many units."""
    setup = Setup(recipe="block128", split=True, outer=2, shard_outer=True, world=8, rank=6)
    with built(setup) as rig:
        reduced: list[tuple[int, int]] = []
        gathers = rig.engine.gather
        for axis in (*gathers.communicators.values(), *gathers.outer.values()):
            axis.all_reduce_max = lambda vector, axis=axis: reduced.append(
                (axis.size, vector.numel())
            )  # type: ignore[attr-defined, method-assign]
        rig.load()
        rig.sync(wait=True)
    assert sorted(reduced) == [(2, 16), (2, 16), (2, 16), (4, 16)], "padded maps of 4 layers"
