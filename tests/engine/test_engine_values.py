"""The engine computes what autograd alone computes, on the slowest network there can be.

`HostRuntime` with collectives that happen only when they are waited for defers as much as it ever
can: a wait that is missing, or a deferred task that reads what has changed meanwhile, gives other
weights. One shard makes the result comparable with a plain model; more shards, with the same
engine on collectives that happen at once.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.engine.engine_cases import Setup, build
from tests.engine.engine_scenarios import SCENARIOS, VARIANTS, PlainRig, variant_cells
from tests.engine.pretended import LateCommunicator, PretendCommunicator, pretended_world

ONE_SHARD = [
    name
    for name, options in VARIANTS.items()
    if name != "untied" and not options.keys() & {"comm_dtype", "main_grads", "world"}
]

SEPARATE_SUMS = {
    (variant, "layer_twice")
    for variant in (
        "reentrant", "overwrites", "overwrites_always", "accumulates", "fused_recompute",
        "slots_fused", "whole_fused", "whole_overwrites",
    )
}
"""Where gradients are summed in another order: the nested backwards of a reentrant recomputation
add to `.grad` one by one; the engine sums each microbatch by itself first. A module that writes
into the bucket adds each call by itself."""


def weights_after(setup: Setup, scenario: str, communicator: Any) -> dict[str, torch.Tensor]:
    with pretended_world(setup.world, setup.rank):
        rig = build(setup, HostRuntime(), communicator)
        SCENARIOS[scenario](rig)
        return rig.weights()


def assert_same_weights(setup: Setup, scenario: str, variant: str = "untied") -> None:
    found = weights_after(setup, scenario, LateCommunicator)
    plain = PlainRig(setup)
    before = plain.weights()
    SCENARIOS[scenario](plain)
    expected = plain.weights()
    assert found.keys() == expected.keys()
    assert any(not torch.equal(before[name], expected[name]) for name in expected)
    exact = (variant, scenario) not in SEPARATE_SUMS
    for name, value in expected.items():
        if exact:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_equal_those_of_a_plain_model(strategy, scenario):
    assert_same_weights(Setup(strategy, world=1, dtype=torch.float32), scenario)


@pytest.mark.parametrize(("strategy", "variant"), variant_cells(ONE_SHARD))
def test_weights_equal_those_of_a_plain_model_in_variants(strategy, variant):
    setup = Setup(strategy, world=1, dtype=torch.float32, **VARIANTS[variant])
    for scenario in ("microbatches", "layer_twice", "backward_raises"):
        assert_same_weights(setup, scenario, variant)


@pytest.mark.parametrize("scenario", ["microbatches", "layers_skipped", "evaluation_between"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_late_collectives_change_nothing(strategy, scenario):
    hybrid = Setup(strategy, world=6, rank=4, outer=2, shard_outer=True)
    for setup in (Setup(strategy, world=3, rank=1), Setup(strategy, dtype=torch.float32), hybrid):
        late = weights_after(setup, scenario, LateCommunicator)
        at_once = weights_after(setup, scenario, PretendCommunicator)
        assert late.keys() == at_once.keys()
        for name, value in at_once.items():
            assert torch.isfinite(value).all()
            assert torch.equal(late[name], value), name


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_wait_that_is_missing_changes_the_weights(strategy):
    """The comparison above can tell. (Reading released weights would end the process.)"""

    class Hasty(HostRuntime):
        def wait(self, role: str, event: Any) -> None:
            """Orders nothing."""

    setup = Setup(strategy, world=3, dtype=torch.float32)
    expected = weights_after(setup, "microbatches", PretendCommunicator)
    with pretended_world(3):
        rig = build(setup, Hasty(), LateCommunicator)
        SCENARIOS["microbatches"](rig)
        found = rig.weights()
    assert any(not torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("shard_outer", [False, True], ids=["replicas", "parts"])
@pytest.mark.parametrize("strategy", [s for s, row in STRATEGIES.items() if row.shard_grads])
def test_with_an_outer_axis_every_microbatch_counts(strategy, shard_outer, told):
    """A step of three, after which the weights are those of a plain model. Untold: nobody says
    which is the last, as in Megatron without overlap, where `no_sync` is wired to nothing."""
    plain = PlainRig(Setup(strategy, dtype=torch.float32))
    plain.step(microbatches=3)
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(2):
        setup = Setup(strategy, rank=rank, dtype=torch.float32, outer=2, shard_outer=shard_outer)
        with pretended_world(2, rank):
            rig = build(setup, HostRuntime(), LateCommunicator)
            if not told:
                rig.last = lambda is_last: None  # type: ignore[method-assign]
            rig.step(microbatches=3)
            for name, value in rig.weights().items():
                parts.setdefault(name, []).append(value)
    for name, expected in plain.weights().items():
        held = [part for part in parts[name] if part.numel()]
        whole = torch.cat(held) if shard_outer else held[rank]
        assert torch.equal(whole.view_as(expected), expected), name


def test_gradients_and_scales_reach_the_optimizer():
    """`.grad` is this rank's rows of the mean over ranks; `scale_grads` multiplies it."""
    setup = Setup("optim_grads_params", world=3, rank=1, dtype=torch.float32)
    with pretended_world(3, 1):
        rig = build(setup)
        rig.zero()
        rig.forward_backward()
        rig.finish()
        grads = {p.managed.fqns[0]: p.sharded.grad for p in rig.engine.pairs}
        before = {name: grad._local_tensor.clone() for name, grad in grads.items()}
        rig.engine.scale_grads(torch.tensor(0.5))
        rig.engine.scale_grads(4)
        for name, grad in grads.items():
            assert torch.equal(grad._local_tensor, before[name] * 2)
        assert any(value.abs().sum() > 0 for value in before.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deleting_the_model_frees_every_buffer_at_once(strategy):
    """Without the cycle collector, after a step and in the middle of one."""
    with pretended_world(2):
        for unfinished in (False, True):
            rig = build(Setup(strategy), HostRuntime(), LateCommunicator)
            rig.step()
            if unfinished:
                rig.zero()
                rig.loss().backward()
            buffers = [
                weakref.ref(flat.tensor.untyped_storage())
                for group in rig.engine.groups
                for flat in (*group.weights, group.main, group.bucket, group.grad)
            ]
            gc.collect()
            gc.disable()
            try:
                rig.forget()
                del rig
                assert [ref for ref in buffers if ref() is not None] == []
            finally:
                gc.enable()
