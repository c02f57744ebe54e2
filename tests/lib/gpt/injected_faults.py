"""Faults of every kind, put into a training run at a chosen place, and the run that comes after.

A run takes `STEPS_BEFORE` steps, saves a checkpoint, and meets its fault in the step after. The
run that comes after loads that checkpoint and goes on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.lib.gpt.checkpoints import loaded, saved

from .changed_models import inner_model
from .checks import check_same_bits
from .gpt import Case, Trainer, batches, build_trainer, init_megatron, train_step

TIMEOUT_S = 6.0
"""Of the process groups of runs that are to time out. Not shorter: a loaded machine may take
seconds for a step."""
STEPS_BEFORE = 2
STEPS_AFTER = 2

CASE = Case(num_layers=2, hidden=16, heads=2, ffn=24, vocab=31, seq=5, batch=1, microbatches=2)


class Mishap(Exception):
    """What a faulty hook raises."""


@dataclass(frozen=True)
class Fault:
    """kind: "raised on one rank", "killed" or "late"; the module of the GPT at which, and whether
    before or after its forward, or in its backward; on which rank, under which strategy."""

    kind: str
    module: str
    when: str
    rank: int
    strategy: str = "optim_grads_params"


# Models that differ.


def _other_shape(model: Any) -> None:
    fc1 = model.decoder.layers[1].mlp.linear_fc1
    fc1.weight = nn.Parameter(torch.randn(CASE.ffn + 4, CASE.hidden))


def _other_order(model: Any) -> None:
    layer = model.decoder.layers[0]
    attention = layer._modules.pop("self_attention")
    layer._modules["self_attention"] = attention


def _layer_missing(model: Any) -> None:
    del model.decoder.layers[1]


def _other_dtype(model: Any) -> None:
    model.decoder.layers[1].mlp.to(torch.bfloat16)


def _frozen(model: Any) -> None:
    model.decoder.layers[0].mlp.linear_fc2.weight.requires_grad_(False)


def _tied(model: Any) -> None:
    model.decoder.layers[1].mlp.linear_fc1.weight = model.decoder.layers[0].mlp.linear_fc1.weight


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    # what is done to the model of one rank, and what the first difference names
    "another shape": (_other_shape, "decoder.layers.1.mlp.linear_fc1.weight (28, 16)"),
    "another order": (_other_order, "unit decoder.layers.0 in the order "),
    "a layer missing": (_layer_missing, "'unit decoder.layers.1'"),
    "another dtype": (_other_dtype, "decoder.layers.1.mlp.linear_fc1.bias (24,) bfloat16"),
    "frozen": (_frozen, "decoder.layers.0.mlp.linear_fc2.weight (16, 24) float32 frozen"),
    "tied": (_tied, "parameter decoder.layers.0.mlp.linear_fc1.weight (24, 16)"),
}


def changing(name: str) -> Callable[[nn.Module], None]:
    """Changes the model of the second rank."""

    def change(model: nn.Module) -> None:
        if dist.get_rank() == 1:
            CHANGES[name][0](inner_model(model))

    return change


class Spoiler:
    """While `value` is set, puts it into the gradient that each backward, or the one of that number
    alone, gives one parameter on the second rank."""

    def __init__(self, name: str, backward: int | None = None) -> None:
        self.name = name
        self.backward = backward
        self.value: float | None = None
        self.calls = 0

    def attach(self, model: nn.Module) -> None:
        [param] = [p for name, p in model.named_parameters() if name.endswith(self.name)]
        param.register_hook(self._grad)

    def _grad(self, grad: torch.Tensor) -> torch.Tensor | None:
        self.calls += 1
        is_chosen = dist.get_rank() == 1 and self.backward in (None, self.calls - 1)
        if self.value is None or not is_chosen:
            return None
        spoiled = grad.clone()
        spoiled.view(-1)[-1] = self.value
        return spoiled


# Faults while training.


@contextmanager
def happening(fault: Fault, model: nn.Module) -> Iterator[None]:
    """Inside, the fault happens whenever its place is reached."""

    def act(*unused: Any) -> None:
        if dist.get_rank() != fault.rank:
            return
        if fault.kind == "raised on one rank":
            raise Mishap
        if fault.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5 * TIMEOUT_S)

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        (output if isinstance(output, torch.Tensor) else output[0]).register_hook(act)

    module = model.get_submodule(fault.module)
    register = {
        "before": lambda: module.register_forward_pre_hook(act),
        "after": lambda: module.register_forward_hook(act),
        "backward": lambda: module.register_forward_hook(watch),
    }
    with register[fault.when]():
        yield


def _steps(trainer: Trainer, numbers: range, rank: int, device: torch.device) -> None:
    for number in numbers:
        train_step(trainer, batches(trainer.case, number, rank, device))


def faulty_run(rank: int, world: int, fault: Fault, root: str) -> None:
    """Steps, a checkpoint, and the fault."""
    device = init_megatron(distributed_timeout_minutes=TIMEOUT_S / 60)
    trainer = build_trainer(CASE, fault.strategy, device)
    _steps(trainer, range(STEPS_BEFORE), rank, device)
    saved(trainer, root)
    with happening(fault, inner_model(trainer.wrapper)):
        _steps(trainer, range(STEPS_BEFORE, STEPS_BEFORE + 1), rank, device)


def resumed_run(rank: int, world: int, fault: Fault, root: str) -> None:
    """Started again from its last checkpoint it ends with the bits of one that was never
    interrupted."""
    device = init_megatron()
    trainer = build_trainer(CASE.but(seed=99), fault.strategy, device)
    trainer.case = CASE
    loaded(trainer, root)
    other = build_trainer(CASE, fault.strategy, device)
    _steps(other, range(STEPS_BEFORE), rank, device)
    for one in (trainer, other):
        _steps(one, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER), rank, device)
    check_same_bits(trainer.params(), other.params(), f"resumed after {fault}")
