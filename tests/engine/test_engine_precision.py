"""The engine with main gradients, communication and sums in dtypes of their own: no races, no
buffer that the formula does not name, and the scale once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.device import HostRuntime, storage_bytes
from megatron_fsdp_adapter.diagnostics.memory import (
    GRADIENT_SHARD,
    LIFE,
    OPTIMIZER_STATE,
    PERSISTENT,
    REDUCE_BUCKET,
    Precision,
    group_bytes,
)
from tests.distributed.memory import Baseline
from tests.engine.engine_cases import Setup, build
from tests.engine.pretended import LateCommunicator, PretendCommunicator
from tests.engine.pretended import pretended_world as world_of

FP32, BF16 = torch.float32, torch.bfloat16
SUMS = {"comm_dtype": BF16, "fp32_accumulation": True}
LATE = ("optim", "optim_grads_params")
"""Whose gradients are kept in another dtype than the wire's, and whose are not: the others go the
same ways."""
REDUCE_SCATTERING = [name for name, row in STRATEGIES.items() if row.shard_main]

DTYPES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bf16 communication": {"comm_dtype": BF16},
    "bf16 gradients": {"main_grads": BF16},
    "bf16 gradients, fp32 communication": {"main_grads": BF16, "comm_dtype": FP32},
    "parameters' own main weights": {"main_params": None},
    "fp32 sums": SUMS,
}


def two_steps(rig: Any) -> None:
    for microbatches in (3, 2):
        rig.step(microbatches)


def cases() -> list[tuple[str, str]]:
    return [
        (strategy, name)
        for strategy in STRATEGIES
        for name in DTYPES
        if name != "fp32 sums" or strategy in REDUCE_SCATTERING
    ]


@pytest.mark.parametrize("name", ("bf16 gradients, fp32 communication", "fp32 sums"))
@pytest.mark.parametrize("strategy", REDUCE_SCATTERING)
def test_transient_buffers_have_no_race(strategy, name):
    for outer in ({}, {"outer": 2, "world": 4, "rank": 1}):
        setup = Setup(strategy, layers=2, **DTYPES[name], **outer)
        with world_of(setup.world, setup.rank):
            rig = build(setup)
            with rig.watch():
                two_steps(rig)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(*case, marks=() if case[0] in LATE else pytest.mark.full)
        for case in cases() if case[1] != "defaults"
    ],
)
def test_late_collectives_change_nothing(strategy, name):
    """On the slowest network there can be, gradients in other dtypes come out the same."""
    weights = []
    for communicator in (LateCommunicator, PretendCommunicator):
        with world_of(3, 1):
            rig = build(
                Setup(strategy, world=3, rank=1, layers=3, **DTYPES[name]),
                HostRuntime(),
                communicator,
            )
            two_steps(rig)
            weights.append(rig.weights())
    for key, value in weights[0].items():
        assert torch.isfinite(value).all() and torch.equal(value, weights[1][key]), key


@pytest.fixture
def frozen_past() -> Iterator[None]:
    """What was made before is not looked through again: counting takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Tally(HostRuntime):
    """Remembers the most bytes of transient buffers that existed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Any] = []
        self.most = 0

    def allocate(self, flat: torch.Tensor) -> None:
        super().allocate(flat)
        self.most = max(self.most, sum(_transient(group) for group in self.groups))


def _transient(group: Any) -> int:
    buffers = [group.bucket] if group.has_transient_bucket else []
    return sum(storage_bytes(buffer.tensor) for buffer in buffers)


@pytest.mark.usefixtures("frozen_past")
@pytest.mark.parametrize(("strategy", "name"), cases())
def test_gradient_buffers_are_those_of_the_formula(strategy, name):
    """Show 2. Every floating-point storage that is alive is counted; the engine is not asked. At
    rest, with gradients, and the most that reductions need at once."""
    options = DTYPES[name]
    setup = Setup(strategy, world=4, rank=2, layers=2, **options)
    precision = Precision(
        main=setup.main_params,
        grad=setup.config.policy.grads_dtype,
        comm=setup.config.policy.comm_dtype,
        state_bytes=0,
    )
    baseline = Baseline()
    with world_of(4, 2):
        baseline.take(torch.nn.Module())
        rig = build(setup, Tally())
        others = {t.untyped_storage()._cdata: storage_bytes(t) for t in rig.initial.values()}
        pretended = sum(others.values())
        rig.runtime.groups = rig.engine.groups
        by_group = [group_bytes(g.layout, setup.config.strategy, precision, 2)
                    for g in rig.engine.groups]  # fmt: skip
        kept = sum(
            count for held in by_group for kind, count in held.items()
            if LIFE[kind] == PERSISTENT and kind != OPTIMIZER_STATE
        )  # fmt: skip
        shards = sum(held.get(GRADIENT_SHARD, 0) for held in by_group)
        rig.forward_backward(1)
        rig.finish()
        rig.zero()
        rig.engine.gather.release_all()
        assert baseline.live_bytes() - pretended == kept, "at rest"
        rig.forward_backward(2)
        rig.finish()
        rig.engine.gather.release_all()
        assert baseline.live_bytes() - pretended == kept + shards, "with gradients"
        units = [sum(by_group[rig.engine.groups.index(g)].get(REDUCE_BUCKET, 0)
                     for g in unit.groups) for unit in rig.engine.units]  # fmt: skip
        assert rig.runtime.most <= sum(sorted(units)[-2:])
        assert (rig.runtime.most >= max(units) > 0) is any(units)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_scale_is_applied_once_wherever_it_is(strategy):
    """Before or after the sum: with 4 ranks a quarter, which is exact, so weights are equal."""
    found = []
    for before in (False, True):
        setup = Setup(strategy, world=4, dtype=FP32, scale_before_sum=before)
        with world_of(4):
            rig = build(setup, HostRuntime())
            two_steps(rig)
            found.append(rig.weights())
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key
