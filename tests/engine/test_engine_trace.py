"""The schedule: golden traces, issue order and counts of collectives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from tests.engine.engine_cases import HIDDEN, Setup, build
from tests.engine.engine_scenarios import SCENARIOS
from tests.engine.pretended import pretended_world
from tests.engine.traces import ZERO_1, ZERO_2, ZERO_3, collectives, schedule, steady

# One step with sharded weights and gradients, once the order is known. Everything that is
# allocated, launched, waited for and freed is here; a line is the stream, what, and of which unit.
# At the end gathers wait for compute twice: for the optimizer, which says that it has written, and
# for whoever may have written after it without saying so.
GOLDEN_ZERO_3 = """
compute wait reduce
compute release embedding.grad
compute release layers.0.grad
compute release layers.1.grad
compute release head.grad
compute release root.grad
compute wait gather
compute wait gather
gather allocate layers.0.weight
gather all_gather layers.0
gather wait compute
gather release embedding.weight
compute wait gather
gather allocate layers.1.weight
gather all_gather layers.1
compute forward layers.0
gather wait compute
gather release layers.0.weight
compute wait gather
gather allocate head.weight
gather all_gather head
compute forward layers.1
gather wait compute
gather release layers.1.weight
compute wait gather
gather allocate layers.1.weight
gather all_gather layers.1
gather wait compute
gather release head.weight
compute allocate head.bucket
compute allocate head.grad
reduce wait compute
reduce reduce_scatter head
compute wait gather
gather allocate layers.0.weight
gather all_gather layers.0
compute backward layers.1
gather wait compute
gather release layers.1.weight
compute allocate layers.1.bucket
compute allocate layers.1.grad
reduce wait compute
reduce reduce_scatter layers.1
compute wait gather
compute backward layers.0
gather wait compute
gather release layers.0.weight
compute wait reduce
compute release head.bucket
compute allocate layers.0.bucket
compute allocate layers.0.grad
reduce wait compute
reduce reduce_scatter layers.0
gather wait compute
gather release root.weight
compute wait reduce
compute release layers.1.bucket
compute allocate root.bucket
compute allocate root.grad
reduce wait compute
reduce reduce_scatter root
compute wait reduce
compute release layers.0.bucket
compute allocate embedding.bucket
compute allocate embedding.grad
reduce wait compute
reduce reduce_scatter embedding
compute wait reduce
compute release root.bucket
compute wait reduce
compute release embedding.bucket
compute wait reduce
compute wait gather
gather wait compute
gather wait compute
gather allocate root.weight
gather all_gather root
gather allocate embedding.weight
gather all_gather embedding
"""

# The same with kept weights and gradient buffers, up to the optimizer step.
GOLDEN_ZERO_1 = """
compute wait reduce
compute wait gather
compute wait gather
gather all_gather layers.0
compute wait gather
gather all_gather layers.1
compute forward layers.0
compute wait gather
gather all_gather head
compute forward layers.1
compute wait gather
reduce wait compute
reduce reduce_scatter head
compute backward layers.1
reduce wait compute
reduce reduce_scatter layers.1
compute backward layers.0
reduce wait compute
reduce reduce_scatter layers.0
reduce wait compute
reduce reduce_scatter root
reduce wait compute
reduce reduce_scatter embedding
compute wait reduce
compute wait gather
"""


def golden(text: str) -> list[str]:
    return text.strip().splitlines()


def test_golden_step_with_sharded_weights():
    assert schedule(steady(Setup(ZERO_3, layers=2)).runtime) == golden(GOLDEN_ZERO_3)


def test_golden_step_with_kept_weights():
    lines = schedule(steady(Setup(ZERO_1, layers=2)).runtime)
    expected = golden(GOLDEN_ZERO_1)
    assert lines[: len(expected)] == expected
    rest = [line for line in lines[len(expected) :] if line != "gather wait compute"]
    assert rest == ["gather all_gather root", "gather all_gather embedding"]


@pytest.mark.parametrize("strategy", [ZERO_1, ZERO_2, ZERO_3])
def test_the_next_gather_is_issued_after_this_wait_and_before_this_forward(strategy):
    lines = schedule(steady(Setup(strategy, layers=5)).runtime)
    for index in range(4):
        forward = lines.index(f"compute forward layers.{index}")
        launched = lines.index(f"gather all_gather layers.{index + 1}")
        waited = max(i for i, line in enumerate(lines[:launched]) if line == "compute wait gather")
        assert waited < launched < forward
        between = lines[waited + 1 : launched]
        assert all(line.startswith("gather allocate") for line in between)


def test_backward_releases_a_unit_before_it_gathers_the_one_after_next():
    lines = schedule(steady(Setup(ZERO_3, layers=6)).runtime)
    lines = lines[lines.index("compute backward layers.5") :]
    for index in range(5, 1, -1):
        released = lines.index(f"gather release layers.{index}.weight")
        launched = lines.index(f"gather all_gather layers.{index - 2}")
        assert lines.index(f"compute backward layers.{index}") < released < launched
        assert launched < lines.index(f"compute backward layers.{index - 1}")


def test_without_overlap_a_gather_is_launched_when_it_is_needed():
    """And the reductions are launched together, when gradients are asked for."""
    lines = schedule(steady(Setup(ZERO_1, layers=3, overlap=False)).runtime)
    before = lines[: lines.index("compute forward layers.0")]
    assert not any("all_gather layers.1" in line for line in before)
    last_backward = lines.index("compute backward layers.0")
    reductions = [i for i, line in enumerate(lines) if "reduce_scatter" in line]
    assert len(reductions) == 6 and min(reductions) > last_backward


# Issue order and counts.


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scenario", ["layers_skipped", "backward_raises", "evaluation_between"])
def test_issue_order_is_equal_on_every_rank(strategy, scenario):
    traces = []
    for rank in range(3):
        setup = Setup(strategy, world=3, rank=rank, recompute="non_reentrant")
        with pretended_world(3, rank):
            rig = build(setup)
            with rig.watch():
                SCENARIOS[scenario](rig)
        traces.append(schedule(rig.runtime))
    assert traces[0] == traces[1] == traces[2]
    assert any("all_reduce" in line or "reduce_scatter" in line for line in traces[0])


@pytest.mark.parametrize("width", [0, 9])
def test_collectives_are_counted_by_unit_and_not_by_parameter(width):
    """Per step of 3 microbatches. In backward, root and head are still there from forward, and an
    embedding needs no weights; between microbatches the root stays."""
    layers = [f"layers.{i}" for i in range(4)]
    units = ["embedding", *layers, "head", "root"]

    def counted(strategy: str) -> Counter[str]:
        return collectives(steady(Setup(strategy, width=width), microbatches=3))

    once = Counter({f"all_gather {unit}": 1 for unit in units})
    assert counted("no_shard") == Counter({f"all_reduce {unit}": 1 for unit in units})
    assert counted(ZERO_1) == once + Counter({f"reduce_scatter {unit}": 1 for unit in units})
    reduced = Counter({f"reduce_scatter {unit}": 3 for unit in units})
    assert counted(ZERO_2) == once + reduced
    times = {"root": 1, "embedding": 3, "head": 3, **dict.fromkeys(layers, 6)}
    gathered = Counter({f"all_gather {unit}": times[unit] for unit in units})
    assert counted(ZERO_3) == gathered + reduced


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_inputs_alone_reduce_nothing(strategy):
    """And leave the step as it was: a backward comes before, and another after."""
    with pretended_world(2):
        rig = build(Setup(strategy))
        with rig.watch():
            rig.step()
            rig.zero()
            rig.last(False)
            rig.loss().backward()
            states = [group.grad_state for group in rig.engine.groups]
            rig.last(True)
            rig.runtime.log.clear()
            x = torch.ones(2, HIDDEN, dtype=rig.setup.dtype, requires_grad=True)
            torch.autograd.grad(rig.model.layers[3](rig.model.layers[1](x)).float().sum(), x)
            assert not any("reduce" in name for name in collectives(rig))
            assert [group.grad_state for group in rig.engine.groups] == states
            rig.loss().backward()
            rig.finish()


def test_gradients_of_inputs_alone_through_fused_weight_gradients_are_an_error():
    with pretended_world(2):
        rig = build(Setup(fused=WgradProtocol.OVERWRITES))
        x = torch.ones(2, HIDDEN, dtype=rig.setup.dtype, requires_grad=True)
        loss = rig.model.layers[1](x).float().sum()
        with pytest.raises(RuntimeError, match="switch gradient_accumulation_fusion off"):
            torch.autograd.grad(loss, x)
        rig.step()


@pytest.mark.parametrize("recompute", ["reentrant", "non_reentrant", "selective"])
def test_recomputing_gathers_nothing_more(recompute):
    plain = collectives(steady(Setup(ZERO_3), microbatches=2))
    assert collectives(steady(Setup(ZERO_3, recompute=recompute), microbatches=2)) == plain


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_domains_of_one_unit_make_one_schedule(strategy):
    """A unit with parameters in two domains has one collective in each, side by side, and the
    same schedule otherwise."""
    setup = Setup(strategy, world=4, rank=3)
    one, two = steady(setup), steady(setup.but(split=True))
    assert {len(unit.groups) for unit in two.engine.units if "layers" in unit.name} == {2}
    sizes = {group.domain.axis.size for group in two.engine.groups}
    assert sizes == {4, 2}
    lines = [line.replace("#1", "") for line in schedule(two.runtime)]
    kept: list[str] = []
    for line in lines:
        kept += [line] if not kept or kept[-1] != line or "wait" in line else []
    assert kept == schedule(one.runtime)
    counted, plain = collectives(two), collectives(one)
    names = [name for name in plain if "layers" in name]
    assert names and all(counted[f"{name}#1"] == counted[name] == plain[name] for name in names)
