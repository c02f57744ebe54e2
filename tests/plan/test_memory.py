"""The bytes that each rank holds are those of the closed formula, and of `estimate`; a wrapper that
is deleted frees them, without the cycle collector (traps L1, D7)."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.plan.memory import (
    BACKWARD_TO_STEP,
    GATHERED_WEIGHTS,
    GRADIENT_SHARD,
    IN_HOST_MEMORY,
    LIFE,
    OPTIMIZER_STATE,
    PERSISTENT,
    STAGED,
)
from tests.lib.engine.engine_cases import buffers_of
from tests.lib.gpt.estimates import estimated
from tests.lib.gpt.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.lib.gpt.memory import measure
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("plan/memory.py", "core/engine/buffer.py", "tools/cli/estimate.py")

BASE = Case(positions="learned_absolute", microbatches=2)
SLOTS = {"fsdp_double_buffer": True}
CASES: list[tuple[Case, dict[str, Any]]] = [
    (BASE.but(tied=tied, bf16=bf16), {}) for tied in (False, True) for bf16 in (False, True)
]
IN_SLOTS = [
    (BASE.but(num_layers=4, bf16=True), SLOTS),
    (BASE, SLOTS),  # too few layers to take turns
]


def expected_points(
    strategy: str, report: dict[str, Any], ddp: Mapping[str, Any], ahead: int
) -> dict[str, int]:
    """ahead: bytes of the weights that are gathered right after a step, for the next forward."""
    reported = report["strategies"][strategy]
    held = reported["bytes"]
    at_rest = sum(count for kind, count in held.items() if LIFE[kind] == PERSISTENT)
    grads = sum(count for kind, count in held.items() if LIFE[kind] == BACKWARD_TO_STEP)
    assert at_rest == reported["between_steps"]
    gathers = report["num_shards"] > 1 and STRATEGIES[strategy].shard_weights
    assert (ahead > 0) == (gathers and not ddp)
    assert ahead <= held.get(GATHERED_WEIGHTS, 0)
    without_state = at_rest - held[OPTIMIZER_STATE]
    return {
        "wrapped": without_state,
        "first: reduced": without_state + grads,
        "first: stepped": at_rest + grads + ahead,
        "first: zeroed": at_rest + ahead,
        "first: at rest": at_rest,
        "second: reduced": at_rest + grads,
        "second: stepped": at_rest + grads + ahead,
        "second: zeroed": at_rest + ahead,
        "second: at rest": at_rest,
    }


FULL = pytest.mark.full
CELLS = []
for case, ddp in CASES:
    CELLS.append(pytest.param(1, case, ddp))
for case, ddp in (*CASES, *IN_SLOTS):
    CELLS.append(pytest.param(2, case, ddp, marks=FULL))
for case, ddp in CASES[1:3]:
    CELLS.append(pytest.param(4, case, ddp))


@pytest.mark.parametrize(("world", "case", "ddp"), CELLS)
@on_ranks(whole=True, seconds=300)
def test_live_bytes_equal_the_formula_and_the_estimate(
    rank: int, world: int, case: Case, ddp: dict[str, Any]
) -> None:
    """Of every rank, for tied and untied weights, in float32 and bfloat16, with Adam's state; on
    two ranks in fixed slots too, and on four tied in float32 and untied in bfloat16."""
    report = estimated(case, world, rank, ddp)
    for strategy in STRATEGIES:
        points = measure(rank, world, case, strategy, ddp)
        ahead = points["first: zeroed"] - points["first: at rest"]
        assert points == expected_points(strategy, report, ddp, ahead), strategy


OFFLOADED = {"chunked_optimizer_state_offload": True}


@pytest.mark.parametrize("bf16", [True, False])
@on_ranks(2, whole=True, seconds=300)
def test_offloaded_state_is_counted_where_it_is(rank: int, world: int, bf16: bool) -> None:
    """On the host both memories are one: what is there is the sum of both. Once gradients are
    reduced, two units are loaded for the step."""
    case = BASE.but(bf16=bf16)
    for strategy, held in estimated(case, world, rank, OFFLOADED)["strategies"].items():
        at_rest = held["between_steps"] + held["bytes"][IN_HOST_MEMORY]
        points = measure(rank, world, case, strategy, OFFLOADED)
        assert points["wrapped"] == at_rest, strategy
        assert points["second: at rest"] == at_rest, strategy
        grads = held["bytes"].get(GRADIENT_SHARD, 0)
        staged = points["second: reduced"] - (at_rest + grads)
        assert 0 < staged <= held["bytes"][STAGED], strategy


# Deleting the model.


def still_there(storages: dict[str, StorageWeakRef]) -> list[str]:
    """What is not freed. Collectives that were running keep their tensors until they are done, and
    a little longer: a thread of gloo's releases them after it has reported the end."""
    dist.barrier()
    for _ in range(600):
        left = [name for name, storage in storages.items() if not storage.expired()]
        if not left:
            break
        time.sleep(0.05)
    return left


def storages_of(trainer: Trainer) -> dict[str, StorageWeakRef]:
    """In a function of its own: a loop's variable would keep the last one."""
    found = {}
    for name, flat in buffers_of(trainer.wrapper.engine):
        found[name] = StorageWeakRef(flat.untyped_storage())
    return found


@on_ranks(2, whole=True)
def test_deleting_a_trained_gpt_and_its_optimizer_frees_the_engines_storage(rank: int) -> None:
    """What Megatron's training script puts into the config is taken away first: bound methods of
    wrapper and optimizer, which refer back to the config, a cycle of its own."""
    device = init_megatron()
    for strategy in STRATEGIES:
        gc.collect()
        gc.disable()
        trainer = build_trainer(BASE, strategy, device)
        train_step(trainer, batches(BASE, 0, rank, device))
        forward_backward(trainer, batches(BASE, 1, rank, device))
        storages = storages_of(trainer)
        config = trainer.wrapper.config
        config.no_sync_func = None
        config.grad_scale_func = None
        del trainer
        left = still_there(storages)
        assert not left, (strategy, left)
        gc.enable()
