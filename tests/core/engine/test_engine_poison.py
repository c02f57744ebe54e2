"""Poisoned buffers: a read of memory that was not written gives NaN, and no other read does."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megatron_fsdp_adapter.core.config import (
    POISON_VARIABLE,
    EngineConfig,
    poison_asked,
    strategy_named,
)
from megatron_fsdp_adapter.core.engine.buffer import FlatBuffer, ShardedBuffer
from megatron_fsdp_adapter.core.engine.grad_buffers import GradBuffers
from megatron_fsdp_adapter.core.engine.reduce import ReducePipeline
from megatron_fsdp_adapter.core.engine.wgrad import FusedWgrad, WgradProtocol
from megatron_fsdp_adapter.core.runtime.device import HostRuntime, fill_with_nan
from tests.lib.engine.engine_cases import built
from tests.lib.engine.pretended import PretendCommunicator
from tests.lib.engine.small_model import Setup

CHECKS = ("core/engine/buffer.py", "core/engine/reduce.py", "core/engine/wgrad.py")


def _weights(setup: Setup) -> list[torch.Tensor]:
    with built(setup.but(poison=True), HostRuntime(), PretendCommunicator) as rig:
        for _ in range(3):
            rig.step()
        return list(rig.weights().values())


def _careless(self: FusedWgrad, empty: bool) -> None:
    self.is_open, self.written = True, set(self._adding)


REDUCTION_OF = ReducePipeline._reduction_of
TAKE = GradBuffers.take
REDUCTION = (
    ReducePipeline,
    "_reduction_of",
    lambda self, group: replace(REDUCTION_OF(self, group), adds=True),
)
KEPT = (GradBuffers, "take", lambda self, accumulate: TAKE(self, accumulate=True))
FAULTS = {
    "a module adds to a bucket that was not cleared": (
        Setup(fused=WgradProtocol.ACCUMULATES),
        (FusedWgrad, "open", _careless),
    ),
    "a module adds to a slot that was not cleared": (
        Setup(fused=WgradProtocol.ACCUMULATES, slots=True),
        (FusedWgrad, "open", _careless),
    ),
    "the first reduction of a step is taken for a later one": (Setup(), REDUCTION),
    # Their memory may have been lent between two steps: what is in it then is not a gradient.
    "a first microbatch adds to kept gradients, no_shard": (Setup("no_shard"), KEPT),
    "a first microbatch adds to kept gradients, optim": (Setup("optim"), KEPT),
    "a unit of host memory is not loaded": (
        Setup(adam=True, offload=True),
        (ShardedBuffer, "load", lambda self: self.allocate()),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_reads_or_adds_to_memory_that_was_not_written_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, fault = FAULTS[name]
    assert not any(value.isnan().any() for value in _weights(setup))
    monkeypatch.setattr(*fault)
    assert any(value.isnan().any() for value in _weights(setup))


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
    config = functools.partial(EngineConfig, strategy_named("optim"))
    monkeypatch.delenv(POISON_VARIABLE, raising=False)
    assert not config().poison_buffers
    assert config(poison_buffers=True).poison_buffers
    monkeypatch.setenv(POISON_VARIABLE, "1")
    assert config().poison_buffers
    monkeypatch.setenv(POISON_VARIABLE, "yes")
    with pytest.raises(ValueError, match=f"{POISON_VARIABLE}='yes': neither 0 nor 1"):
        poison_asked()
