"""Poisoned buffers: who reads or adds to what nobody wrote gets NaN, and nobody else does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import (
    POISON_VARIABLE,
    STRATEGIES,
    EngineConfig,
    poison_asked,
    strategy_named,
)
from megatron_fsdp_adapter.core.engine.buffer import FlatBuffer
from megatron_fsdp_adapter.core.engine.group import ParamGroup
from megatron_fsdp_adapter.core.engine.wgrad import FusedWgrad, WgradProtocol
from megatron_fsdp_adapter.core.runtime.device import HostRuntime, fill_with_nan
from tests.engine.engine_cases import Setup, build
from tests.engine.engine_scenarios import SCENARIOS, VARIANTS
from tests.engine.pretended import PretendCommunicator, pretended_world

COVERED = ("untied", "frozen", "bf16_comm", "accumulates", "overwrites", "slots", "slots_exchange",
           "slots_fused", "shared_instances")  # fmt: skip


def _weights(setup: Setup, scenario: str) -> dict[str, torch.Tensor]:
    with pretended_world(setup.world, setup.rank):
        rig = build(setup, HostRuntime(), PretendCommunicator)
        SCENARIOS[scenario](rig)
        return rig.weights()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POISON_VARIABLE, "1")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_poisoned_engine_trains_to_the_same_bits(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variant in COVERED:
        if variant == "slots_exchange" and not STRATEGIES[strategy].shard_grads:
            continue
        setup = Setup(strategy=strategy).but(**VARIANTS[variant])
        for scenario in ("microbatches", "evaluation_between", "zero_before_finish"):
            monkeypatch.setenv(POISON_VARIABLE, "0")
            expected = _weights(setup, scenario)
            monkeypatch.setenv(POISON_VARIABLE, "1")
            found = _weights(setup, scenario)
            for name, value in expected.items():
                assert torch.equal(found[name], value), (variant, scenario, name)


@pytest.mark.parametrize("slots", [False, True], ids=["allocated", "slots"])
@pytest.mark.usefixtures("poisoned")
def test_a_module_that_adds_to_a_bucket_that_nobody_cleared_is_seen(
    slots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(self: FusedWgrad, empty: bool) -> None:
        self.is_open, self._written = True, set(self._adding)

    monkeypatch.setattr(FusedWgrad, "open", careless)
    setup = Setup(fused=WgradProtocol.ACCUMULATES, slots=slots)
    found = _weights(setup, "steps")
    assert any(value.isnan().any() for value in found.values())


@pytest.mark.usefixtures("poisoned")
def test_a_reduction_into_gradients_that_were_not_cleared_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever takes the first reduction of a step for a later one adds to what is not there."""
    from megatron_fsdp_adapter.core.engine.reduce import ReducePipeline

    plain = ReducePipeline._reduction_of
    monkeypatch.setattr(
        ReducePipeline, "_reduction_of", lambda self, group: replace(plain(self, group), adds=True)
    )
    found = _weights(Setup(), "steps")
    assert any(value.isnan().any() for value in found.values())


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.usefixtures("poisoned")
def test_a_first_microbatch_that_adds_to_kept_gradients_is_seen(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory may have been lent between two steps: what is in it then is not a gradient."""
    take = ParamGroup.take_grads
    monkeypatch.setattr(
        ParamGroup, "take_grads", lambda self, accumulate: take(self, accumulate=True)
    )
    found = _weights(Setup(strategy), "steps")
    assert any(value.isnan().any() for value in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_has_a_poison(dtype: torch.dtype) -> None:
    flat = torch.zeros(7, dtype=dtype)
    fill_with_nan(flat)
    assert flat.isnan().all()


def test_fixed_memory_is_poisoned_when_it_is_given_back_and_only_then() -> None:
    runtime = HostRuntime()
    runtime.poison = True
    place = torch.zeros(16, dtype=torch.uint8)
    one, other = (FlatBuffer(4, torch.float32, runtime, place) for _ in range(2))
    one.release()
    other.release()
    assert one.tensor.isnan().all()
    one.allocate()
    one.tensor.fill_(3.0)
    one.allocate()  # taken already: what it holds stays
    other.release()  # given back before: another buffer's contents stay
    assert (one.tensor == 3.0).all()
    one.release()
    assert other.tensor.isnan().all()


def test_the_environment_variable_is_read_when_an_engine_is_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def config(**options: Any) -> EngineConfig:
        return EngineConfig(strategy_named("optim"), **options)

    monkeypatch.delenv(POISON_VARIABLE, raising=False)
    assert not config().poison_buffers and config(poison_buffers=True).poison_buffers
    monkeypatch.setenv(POISON_VARIABLE, "1")
    assert config().poison_buffers
    monkeypatch.setenv(POISON_VARIABLE, "yes")
    with pytest.raises(ValueError, match=f"{POISON_VARIABLE}='yes': use 1"):
        poison_asked()
