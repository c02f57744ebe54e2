"""A run with SGD goes on as if never stopped, and its momentum is read on another number of
ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from test_wrapper_roundtrip import (
    STRATEGIES,
    _assert_same,
    _bits,
    _load,
    _poison,
    _preprocessed,
    _save,
    _sharded_state,
)

from megatron_fsdp_adapter.checkpoint.dcp import load_checkpoint

WHOLE = "whole.pt"


def _whole(trainer: Any) -> dict[str, torch.Tensor]:
    from tests.distributed.gpt import full_all

    state = _sharded_state(trainer, is_loading=False)["optimizer"]["state"]
    momenta = full_all({name: entry["momentum_buffer"] for name, entry in state.items()})
    return {**trainer.params(), **{f"{name}.momentum": value for name, value in momenta.items()}}


def _resume(rank: int, size: int, root: str) -> None:
    from megatron_fsdp_adapter import install
    from tests.adapter.test_sgd import CASE, sgd_trainer
    from tests.distributed.gpt import batches, init_megatron, train_step

    device = init_megatron()
    install()

    def steps(trainer: Any, first: int) -> list[tuple[float, float]]:
        return [
            train_step(trainer, batches(CASE, step, rank, device)) for step in (first, first + 1)
        ]

    for strategy in STRATEGIES:
        folder = f"{root}/{strategy}"
        first = sgd_trainer(CASE, strategy, device, 0.9)
        steps(first, 0)
        keys, saved, whole = _save(first, folder), _bits(first), _whole(first)
        if rank == 0:
            torch.save(whole, f"{root}/{strategy}-{WHOLE}")
        losses, final = steps(first, 2), _bits(first)
        second = sgd_trainer(CASE.but(seed=4321), strategy, device, 0.9)
        _poison(second)
        _load(second, folder)
        _assert_same(_bits(second), saved, f"{strategy}, just loaded")
        assert steps(second, 2) == losses, strategy
        _assert_same(_bits(second), final, f"{strategy}, two steps on")
        assert _save(second, f"{folder}-again") == keys


def _load_elsewhere(rank: int, size: int, root: str) -> None:
    from megatron_fsdp_adapter import install
    from tests.adapter.test_sgd import CASE, sgd_trainer
    from tests.distributed.gpt import init_megatron

    device = init_megatron()
    install()
    for strategy in STRATEGIES:
        trainer = sgd_trainer(CASE, "optim_grads_params", device, 0.9)
        _poison(trainer)
        raw = _sharded_state(trainer, is_loading=True)
        state = _preprocessed(trainer, {key: raw[key] for key in ("model", "optimizer")})
        others = ("rng_state", "iteration")
        load_checkpoint(f"{root}/{strategy}", state, ignore_unexpected=others)
        expected, found = torch.load(f"{root}/{strategy}-{WHOLE}"), _whole(trainer)
        assert expected.keys() == found.keys()
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different, (strategy, different)


@pytest.mark.parametrize(("size", "other"), [(2, 1)])
def test_momentum_is_resumed_and_read_by_another_number_of_ranks(
    tmp_path: Path, size: int, other: int
) -> None:
    run_ranks(_resume, size, str(tmp_path), timeout=300)
    run_ranks(_load_elsewhere, other, str(tmp_path), timeout=300)
