"""The bytes that each rank holds are those of the closed formula, and of `estimate`; a wrapper that
is deleted frees them, without the cycle collector (traps L1, D7)."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fsdp_adapter.cli import estimate
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.diagnostics.memory import (
    BACKWARD_TO_STEP,
    GATHERED_WEIGHTS,
    GRADIENT_SHARD,
    IN_HOST_MEMORY,
    LIFE,
    OPTIMIZER_STATE,
    PERSISTENT,
    STAGED,
)
from tests.distributed.gpt import (
    Case,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.distributed.launch import run_ranks
from tests.distributed.memory import measure_all
from tests.engine.engine_cases import buffers_of

BASE = Case(positions="learned_absolute", microbatches=2)
SLOTS = {"fsdp_double_buffer": True}
CASES: list[tuple[Case, dict[str, Any]]] = [
    (BASE.but(tied=tied, bf16=bf16), {}) for tied in (False, True) for bf16 in (False, True)
]
IN_SLOTS: list[tuple[Case, dict[str, Any]]] = [
    (BASE.but(num_layers=4, bf16=True), SLOTS),
    (BASE, SLOTS),  # too few layers to take turns
]


def flags(
    case: Case, world: int, rank: int, ddp: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """The case on the command line of `estimate`."""
    options = {
        "--num-layers": case.num_layers,
        "--hidden-size": case.hidden,
        "--num-attention-heads": case.heads,
        "--ffn-hidden-size": case.ffn,
        "--padded-vocab-size": case.vocab,
        "--max-position-embeddings": case.seq,
        "--params-dtype": "bf16" if case.bf16 else "fp32",
        "--data-parallel-size": world,
        "--rank": rank,
    }
    tied = "--no-" if case.tied else "--"
    words = [str(word) for pair in options.items() for word in pair]
    switches = [f"--{name.replace('_', '-')}" for name in ddp]
    return [*words, f"{tied}untie-embeddings-and-output-weights", *switches, "--json"]


def estimated(
    case: Case,
    world: int,
    rank: int,
    capsys: Any,
    ddp: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    capsys.readouterr()
    assert estimate.main(flags(case, world, rank, ddp)) == 0
    return json.loads(capsys.readouterr().out)


def expected_points(
    strategy: str, report: dict[str, Any], ddp: Mapping[str, Any], ahead: int
) -> dict[str, int]:
    """ahead: bytes of the weights that are gathered right after a step, for the next forward."""
    held = report["strategies"][strategy]["bytes"]
    lives = {
        life: sum(count for kind, count in held.items() if LIFE[kind] == life)
        for life in (PERSISTENT, BACKWARD_TO_STEP)
    }
    at_rest, grads = lives[PERSISTENT], lives[BACKWARD_TO_STEP]
    assert at_rest == report["strategies"][strategy]["between_steps"]
    gathers = report["num_shards"] > 1 and STRATEGIES[strategy].shard_weights
    assert (ahead > 0) == (gathers and not ddp) and ahead <= held.get(GATHERED_WEIGHTS, 0)
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


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full), 4])
def test_live_bytes_equal_the_formula_and_the_estimate(world, capsys):
    """Of every rank, for tied and untied weights, in float32 and bfloat16, with Adam's state; on
    two ranks in fixed slots too, and on four tied in float32 and untied in bfloat16."""
    cases = {1: CASES, 2: [*CASES, *IN_SLOTS], 4: CASES[1:3]}[world]
    measured = run_ranks(
        measure_all, world, cases, list(STRATEGIES), timeout=300, whole=True
    )
    for rank, found in enumerate(measured):
        for number, (case, ddp) in enumerate(cases):
            report = estimated(case, world, rank, capsys, ddp)
            for strategy in STRATEGIES:
                points = found[number, strategy]
                ahead = points["first: zeroed"] - points["first: at rest"]
                expected = expected_points(strategy, report, ddp, ahead)
                assert points == expected, (case, ddp, strategy, rank)


OFFLOADED = {"chunked_optimizer_state_offload": True}


@pytest.mark.parametrize("bf16", [True, False])
def test_offloaded_state_is_counted_where_it_is(bf16, capsys):
    """On the host both memories are one: what is there is the sum of both. Once gradients are
    reduced, two units are loaded for the step."""
    case = BASE.but(bf16=bf16)
    measured = run_ranks(measure_all, 2, [(case, OFFLOADED)], list(STRATEGIES), timeout=300)
    for rank, found in enumerate(measured):
        report = estimated(case, 2, rank, capsys, OFFLOADED)["strategies"]
        for strategy, held in report.items():
            at_rest = held["between_steps"] + held["bytes"][IN_HOST_MEMORY]
            points = found[0, strategy]
            assert points["second: at rest"] == points["wrapped"] == at_rest, strategy
            grads = held["bytes"].get(GRADIENT_SHARD, 0)
            staged = points["second: reduced"] - (at_rest + grads)
            assert 0 < staged <= held["bytes"][STAGED], strategy


# Deleting the model.


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def still_there(storages: dict[str, StorageWeakRef]) -> list[str]:
    """What is not freed. Collectives that were running keep their tensors until they are done, and
    a little longer: a thread of gloo's lets go of them after it has told that it is done."""
    dist.barrier()
    for _ in range(600):
        left = [name for name, storage in storages.items() if not storage.expired()]
        if not left:
            break
        time.sleep(0.05)
    return left


def _delete_gpt(rank: int, world: int) -> None:
    device = init_megatron()
    for strategy in STRATEGIES:
        with without_collector():
            trainer = build_trainer(BASE, strategy, device)
            train_step(trainer, batches(BASE, 0, rank, device))
            forward_backward(trainer, batches(BASE, 1, rank, device))
            storages = {
                name: StorageWeakRef(flat.untyped_storage())
                for name, flat in buffers_of(trainer.wrapper.engine)
            }
            config = trainer.wrapper.config
            config.no_sync_func = config.grad_scale_func = None
            del trainer
            left = still_there(storages)
            assert not left, (strategy, left)


def test_deleting_a_trained_gpt_and_its_optimizer_frees_the_engines_storage() -> None:
    """What Megatron's training script puts into the config is taken away first: bound methods of
    wrapper and optimizer, which refer back to the config, a cycle of its own."""
    run_ranks(_delete_gpt, 2)
