"""`check_for_large_grads`: norms of gradients go to core's rerun state machine, which judges."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core import rerun_state_machine

from megatron_fsdp_adapter.megatron import grad_checks
from tests.distributed.gpt import STRATEGIES, Case, Trainer, batches, build_trainer, train_step

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2)
SAMPLES = 100  # of which core takes the largest, before it judges


@pytest.fixture
def machine() -> Iterator[Any]:
    """Core's, new and without reruns, as it is by default."""
    rerun_state_machine.destroy_rerun_state_machine()
    yield rerun_state_machine.get_rerun_state_machine()
    rerun_state_machine.destroy_rerun_state_machine()


def _scaled(trainer: Trainer, factor: float) -> None:
    """Gradients of the next steps are `factor` times as large: those of a larger loss."""
    trainer.wrapper.config.grad_scale_func = lambda loss: loss * factor


def _noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    notes: list[tuple[str, float]] = []
    judge: Callable[..., None] = grad_checks.judge_norm
    monkeypatch.setattr(
        grad_checks, "judge_norm",
        lambda name, norm: (notes.append((name, norm.item())), judge(name, norm)),
    )  # fmt: skip
    return notes


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bf16", [False, True])
def test_norms_of_the_units_are_those_of_the_gradients(
    one_rank: torch.device, machine: Any, monkeypatch: pytest.MonkeyPatch, strategy: str, bf16: bool
) -> None:
    """Together they are the norm that core finds for clipping."""
    case = CASE.but(microbatches=1, bf16=bf16)
    notes = _noted(monkeypatch)
    trainer = build_trainer(case, strategy, one_rank, ddp={"check_for_large_grads": True})
    for step in range(3):
        notes.clear()
        _, norm = train_step(trainer, batches(case, step, 0, one_rank))
        assert len({name for name, _ in notes}) == len(notes) > 1
        together = math.sqrt(sum(value**2 for _, value in notes))
        assert together == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_norm_far_above_the_first_ones_is_a_warning_that_names_the_unit(
    one_rank: torch.device, machine: Any, caplog: pytest.LogCaptureFixture, strategy: str
) -> None:
    """And training goes on. No warning before, nor for one that is somewhat larger."""
    trainer = build_trainer(CASE, strategy, one_rank, ddp={"check_for_large_grads": True})
    step = 0
    with caplog.at_level(logging.WARNING, logger=rerun_state_machine.__name__):
        while machine.large_value_counts.get("grads", 0) < SAMPLES:
            train_step(trainer, batches(CASE, step, 0, one_rank))
            step += 1
        for factor, found in ((1.0, False), (2.0, False), (1e4, True)):
            caplog.clear()
            _scaled(trainer, factor)
            train_step(trainer, batches(CASE, step, 0, one_rank))
            said = [text for text in caplog.messages if "unexpectedly large" in text]
            assert bool(said) == found, (factor, said)
        assert any("unit decoder.layers.0 " in text for text in said)


def test_an_infinite_gradient_is_left_to_the_other_check(
    one_rank: torch.device, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"check_for_large_grads": True, "check_for_nan_in_grad": True}
    notes = _noted(monkeypatch)
    trainer = build_trainer(CASE, "optim_grads_params", one_rank, ddp=options)
    train_step(trainer, batches(CASE, 0, 0, one_rank))
    assert notes
    _scaled(trainer, math.inf)
    with pytest.raises(RuntimeError, match="not finite before communication"):
        train_step(trainer, batches(CASE, 1, 0, one_rank))


def test_without_the_option_nothing_is_looked_at(one_rank: torch.device) -> None:
    trainer = build_trainer(CASE, "optim_grads_params", one_rank)
    assert grad_checks.chosen_check(trainer.wrapper.ddp_config) is None
