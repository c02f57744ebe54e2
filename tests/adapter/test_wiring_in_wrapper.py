"""The wrapper's own first step shows a training loop that tested it against another class."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_fsdp_adapter import install, uninstall
from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_step,
    train_step,
)

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2)
DEVICE = torch.device("cpu")


@pytest.fixture
def installed_wrapper() -> Iterator[None]:
    install()
    yield
    uninstall()


def unwired(strategy: str) -> Trainer:
    """As Megatron leaves it when its isinstance test fails."""
    trainer = build_trainer(CASE, strategy, DEVICE)
    trainer.wrapper.config.no_sync_func = None
    return trainer


@pytest.mark.parametrize("strategy", ("optim", "optim_grads_params"))
def test_an_unwired_loop_is_an_error_in_its_first_step(
    one_rank: torch.device, installed_wrapper: None, strategy: str
) -> None:
    trainer = unwired(strategy)
    with pytest.raises(RuntimeError, match=r"call megatron_fsdp_adapter\.install\(\) after"):
        train_step(trainer, batches(CASE, 0, 0, DEVICE))


def test_a_wired_loop_trains(one_rank: torch.device, installed_wrapper: None) -> None:
    trainer = build_trainer(CASE, "optim", DEVICE)
    for step in range(2):
        train_step(trainer, batches(CASE, step, 0, DEVICE))


def test_whoever_did_not_install_may_leave_it_unwired(one_rank: torch.device) -> None:
    """ZeRO-2 and 3 reduce every microbatch anyway."""
    train_step(unwired("optim_grads_params"), batches(CASE, 0, 0, DEVICE))


def test_a_loop_of_ones_own_may_call_no_sync(
    one_rank: torch.device, installed_wrapper: None
) -> None:
    wrapper = unwired("optim").wrapper
    first, last = batches(CASE, 0, 0, DEVICE)

    def backward(tokens: torch.Tensor) -> None:
        losses, loss_func = forward_step(CASE, iter([tokens]), wrapper)
        loss_func(losses)[0].backward()

    wrapper.zero_grad_buffer()
    with wrapper.no_sync():
        backward(first)
    backward(last)
    wrapper.finish_grad_sync()
