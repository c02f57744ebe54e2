"""A run with SGD, or with Lion, goes on as if never stopped, and its momentum is read on another
number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from megatron.core.optimizer import OptimizerConfig
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
KINDS = {"sgd": "momentum_buffer", "lion": "exp_avg"}
"""What an optimizer keeps of a weight."""


def _trainer(kind: str, case: Any, strategy: str, device: Any) -> Any:
    from tests.adapter.test_sgd import sgd_trainer
    from tests.distributed.lion import lion_trainer

    if kind == "sgd":
        return sgd_trainer(case, strategy, device, 0.9)
    return lion_trainer(case, strategy, device)


def _whole(trainer: Any, kind: str) -> dict[str, torch.Tensor]:
    from tests.distributed.gpt import full_all

    state = _sharded_state(trainer, is_loading=False)["optimizer"]["state"]
    momenta = full_all({name: entry[KINDS[kind]] for name, entry in state.items()})
    return {**trainer.params(), **{f"{name}.momentum": value for name, value in momenta.items()}}


def _sorted_bits(trainer: Any) -> dict[str, torch.Tensor]:
    """State of empty shards comes last where a step has made the others'."""
    return dict(sorted(_bits(trainer).items()))


def _resume(rank: int, size: int, root: str, kind: str) -> None:
    from megatron_fsdp_adapter import install
    from tests.adapter.test_sgd import CASE
    from tests.distributed.gpt import batches, init_megatron, train_step

    device = init_megatron()
    install()

    def steps(trainer: Any, first: int) -> list[tuple[float, float]]:
        return [
            train_step(trainer, batches(CASE, step, rank, device)) for step in (first, first + 1)
        ]

    for strategy in STRATEGIES:
        folder = f"{root}/{strategy}"
        first = _trainer(kind, CASE, strategy, device)
        steps(first, 0)
        keys, saved, whole = sorted(_save(first, folder)), _sorted_bits(first), _whole(first, kind)
        if rank == 0:
            torch.save(whole, f"{root}/{strategy}-{WHOLE}")
        losses, final = steps(first, 2), _sorted_bits(first)
        second = _trainer(kind, CASE.but(seed=4321), strategy, device)
        _poison(second)
        _load(second, folder)
        _assert_same(_sorted_bits(second), saved, f"{strategy}, just loaded")
        assert steps(second, 2) == losses, strategy
        _assert_same(_sorted_bits(second), final, f"{strategy}, two steps on")
        assert sorted(_save(second, f"{folder}-again")) == keys


def _load_elsewhere(rank: int, size: int, root: str, kind: str) -> None:
    from megatron_fsdp_adapter import install
    from tests.adapter.test_sgd import CASE
    from tests.distributed.gpt import init_megatron

    device = init_megatron()
    install()
    for strategy in STRATEGIES:
        trainer = _trainer(kind, CASE, "optim_grads_params", device)
        _poison(trainer)
        raw = _sharded_state(trainer, is_loading=True)
        state = _preprocessed(trainer, {key: raw[key] for key in ("model", "optimizer")})
        others = ("rng_state", "iteration")
        load_checkpoint(f"{root}/{strategy}", state, ignore_unexpected=others)
        expected, found = torch.load(f"{root}/{strategy}-{WHOLE}"), _whole(trainer, kind)
        assert expected.keys() == found.keys()
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different, (strategy, different)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "other"), [(2, 1)])
def test_momentum_is_resumed_and_read_by_another_number_of_ranks(
    tmp_path: Path, size: int, other: int, kind: str
) -> None:
    if kind == "lion" and not hasattr(OptimizerConfig, "lion_beta1"):
        pytest.skip("this release has no optimizer 'lion'")
    run_ranks(_resume, size, str(tmp_path), kind, timeout=300)
    run_ranks(_load_elsewhere, other, str(tmp_path), kind, timeout=300)
