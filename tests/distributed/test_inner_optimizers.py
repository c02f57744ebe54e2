"""What a program does to Megatron's inner optimizer, whichever steps: it clears the state, takes
parameters out of its groups, or goes on after a step that raised. In plain loops, beside torch:
tests/distributed/state_loops.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.checks import Step, check_run_bits, recorded_step
from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    init_megatron,
    train_step,
)
from tests.distributed.launch import run_ranks
from tests.distributed.lion import IN_CORE

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=1, adam_eps=1e-3)
STREAMED = {"chunked_optimizer_state_offload": True}
KINDS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Adam": ({}, {}),
    "streamed": (STREAMED, {}),
    "Muon": ({}, {"optimizer": "muon"}),
    **({"Lion": ({}, {"optimizer": "lion"})} if IN_CORE else {}),
}
"""Fields of the DDP config, and of the optimizer's."""

ADAM = sys.modules[torch.optim.Adam.__module__]
"""The module of torch's function, which `torch.optim` hides."""

Act = Callable[[Trainer, int, torch.device], None]


def _trainer(kind: str, clip: float, device: torch.device) -> Trainer:
    ddp, options = KINDS[kind]
    case = CASE.but(clip=clip)
    return build_trainer(case, "optim_grads_params", device, ddp=ddp, optimizer=options)


def _run(kind: str, clip: float, act: Act, rank: int, device: torch.device) -> list[Step]:
    """Two steps, what `act` does, and two more."""
    trainer = _trainer(kind, clip, device)
    found = []
    for step in range(4):
        if step == 2:
            act(trainer, rank, device)
        found.append(recorded_step(trainer, batches(CASE, step, rank, device)))
    return found


def _adam_does(effect: Any) -> Act:
    """A step in which torch's Adam has that side effect, and no other."""

    def act(trainer: Trainer, rank: int, device: torch.device) -> None:
        inner = distributed_optimizer(trainer).optimizer
        before = [list(group["params"]) for group in inner.param_groups]
        with mock.patch.object(ADAM, "adam", mock.Mock(side_effect=effect)):
            data = batches(CASE, 9, rank, device)
            if effect is None:
                recorded_step(trainer, data)
            else:
                with pytest.raises(MemoryError):
                    recorded_step(trainer, data)
        for group, params in zip(inner.param_groups, before, strict=True):
            assert list(map(id, group["params"])) == list(map(id, params))

    return act


def _raises(rank: int, world: int) -> None:
    device = init_megatron()
    for kind in KINDS:
        for clip in (0.0, 0.05) if kind in ("Adam", "Muon") else (0.05,):
            expected = _run(kind, clip, _adam_does(None), rank, device)
            found = _run(kind, clip, _adam_does(MemoryError), rank, device)
            check_run_bits(found, expected, f"{kind}, clip {clip}")


def test_a_step_that_raised_leaves_the_next_one_right() -> None:
    """On all ranks, in Adam's part: what Muon and Lion have updated before stays so."""
    run_ranks(_raises, 2, timeout=300)


def _cleared(trainer: Trainer, rank: int, device: torch.device) -> None:
    trainer.optimizer.state.clear()


def _zeroed(trainer: Trainer, rank: int, device: torch.device) -> None:
    trainer.wrapper.stop_communication()
    for state in trainer.optimizer.state.values():
        for value in state.values():
            getattr(value, "_local_tensor", value).zero_()


def _clears(rank: int, world: int) -> None:
    device = init_megatron()
    for kind in KINDS:
        expected = _run(kind, 0.05, _zeroed, rank, device)
        check_run_bits(_run(kind, 0.05, _cleared, rank, device), expected, kind)


def test_state_that_is_cleared_is_zero_in_the_next_step() -> None:
    run_ranks(_clears, 2, timeout=300)


def _has_fewer(rank: int, world: int) -> None:
    device = init_megatron()
    for kind in KINDS:
        trainer = _trainer(kind, 0.05, device)
        train_step(trainer, batches(CASE, 0, rank, device))
        trainer.wrapper.stop_communication()
        groups = distributed_optimizer(trainer).optimizer.param_groups
        taken = [param for group in groups for param in group["params"][1::2]]
        for group in groups:
            group["params"] = group["params"][::2]
        if kind == "streamed":
            with pytest.raises(ValueError, match="param_groups with other parameters"):
                train_step(trainer, batches(CASE, 1, rank, device))
            continue
        kept = [param for group in groups for param in group["params"]]
        before = [[param._local_tensor.clone() for param in params] for params in (taken, kept)]
        train_step(trainer, batches(CASE, 1, rank, device))
        for params, values, stays in zip((taken, kept), before, (True, False), strict=True):
            both = zip(params, values, strict=True)
            same = [torch.equal(param._local_tensor, v) for param, v in both if v.numel()]
            assert same == [stays] * len(same) and same, kind


def test_parameters_that_are_taken_out_of_groups_are_stepped_no_more() -> None:
    """Refused where units are planned."""
    run_ranks(_has_fewer, 2, timeout=300)
