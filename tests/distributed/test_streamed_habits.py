"""What a training loop does around steps whose updates go on, of an optimizer in host memory: the
bits of steps that wait, and no race between streams, which are pretended, so that they are seen on
a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter import export_weights, release_memory, return_memory
from megatron_fsdp_adapter.sharding import building
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
    load_weights,
    train_step,
)
from tests.distributed.launch import run_ranks
from tests.distributed.test_streamed_readers import OFFLOAD
from tests.engine.recording import RecordingRuntime

CPU = torch.device("cpu")
CASE = Case(
    num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.05, bf16=True
)
FP16 = {"bf16": False, "fp16": True}
Habit = Callable[[Trainer, int], Any]


def _step(trainer: Trainer, number: int) -> Any:
    return train_step(trainer, batches(trainer.case, number, 0, CPU))


def _tried(trainer: Trainer, number: int) -> tuple[bool, Any, Any]:
    """A step that may be left out."""
    forward_backward(trainer, batches(trainer.case, number, 0, CPU))
    found: tuple[bool, Any, Any] = trainer.optimizer.step()
    return found


def _overflows(trainer: Trainer, number: int) -> Any:
    found = _step(trainer, number)
    forward_backward(trainer, batches(trainer.case, number + 10, 0, CPU))
    for param in trainer.wrapper.parameters():
        param.grad._local_tensor.fill_(float("inf"))
    left_out = trainer.optimizer.step()
    assert left_out[0] is False
    return found, float(trainer.optimizer.get_loss_scale())


def _norm_is_large(trainer: Trainer, number: int) -> Any:
    found, config = _step(trainer, number), distributed_optimizer(trainer).config
    config.grad_norm_skip_threshold = 0.0
    left_out = _tried(trainer, number + 10)
    config.grad_norm_skip_threshold = float("inf")
    assert left_out[0] is False
    return found, left_out


def _zeros_are_counted(trainer: Trainer, number: int) -> Any:
    config = distributed_optimizer(trainer).config
    config.log_num_zeros_in_grad = True
    found = _tried(trainer, number)
    config.log_num_zeros_in_grad = False
    return found


def _rates_change(trainer: Trainer, number: int) -> Any:
    groups = trainer.optimizer.param_groups
    before = [(group["lr"], group["weight_decay"]) for group in groups]
    for group in groups:
        group["lr"], group["weight_decay"] = 1e-2 / (1 + number), 0.1 * number
    found = _step(trainer, number)
    for group, (rate, decay) in zip(groups, before, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    return found


def _forgets_often(trainer: Trainer, number: int) -> Any:
    found = _step(trainer, number)
    for forget in (trainer.optimizer.zero_grad, trainer.wrapper.zero_grad_buffer) * 2:
        forget()
    return found


def _goes_back(trainer: Trainer, number: int) -> Any:
    """To what was saved right after a step, from one step later."""
    found, inner = _step(trainer, number), distributed_optimizer(trainer)
    saved = inner.sharded_param_state_fsdp_dtensor()
    state = {
        name: {key: v.detach().clone() if isinstance(v, torch.Tensor) else v
               for key, v in entry.items()}
        for name, entry in saved["state"].items()
    }  # fmt: skip
    meta = {name: dict(options) for name, options in saved["param_to_group_meta"].items()}
    weights = {name: value.clone() for name, value in trainer.params().items()}
    _step(trainer, number + 10)
    inner.load_state_dict({"state": state, "param_to_group_meta": meta})
    load_weights(trainer, weights)
    return found


def _evaluates(trainer: Trainer, number: int) -> Any:
    found = [_step(trainer, number)]
    for other in (50, 51):
        data = batches(trainer.case, other, 0, CPU)
        found.append(forward_backward(trainer, data, forward_only=True))
    return found


def _memory_goes(trainer: Trainer, number: int) -> Any:
    found = _step(trainer, number)
    release_memory(trainer.wrapper, trainer.optimizer)
    return_memory(trainer.wrapper, trainer.optimizer)
    return found


def _exports(trainer: Trainer, number: int) -> Any:
    found = _step(trainer, number)
    weights = dict(export_weights(trainer.wrapper, dtype=None))
    return found, [float(value.double().sum()) for value in weights.values()]


def _steps_twice(trainer: Trainer, number: int) -> Any:
    """With gradients that the first step has clipped."""
    return _step(trainer, number), trainer.optimizer.step()


def _cores_offload(trainer: Trainer, number: int) -> Any:
    """Of state and gradients, for reinforcement learning."""
    found, inner = _step(trainer, number), distributed_optimizer(trainer)
    inner.offload_to_cpu()
    trainer.wrapper.offload_grad_buffers()
    trainer.wrapper.restore_grad_buffers()
    inner.restore_from_cpu()
    return found


HABITS: dict[Habit, dict[str, Any]] = {
    _overflows: FP16,
    _norm_is_large: {},
    _zeros_are_counted: {"tied": True, "recompute": "full-1"},
    _rates_change: {"clip": 0.0},
    _forgets_often: {"microbatches": 1},
    _goes_back: {},
    _evaluates: {"bf16": False, "microbatches": 3},
    _memory_goes: {"clip": 0.0},
    _exports: FP16,
    _steps_twice: {},
    _cores_offload: {"tied": True},
}
"""What changes in the case."""


def _trained(habit: Habit, ddp: dict[str, Any], strategy: str) -> tuple[list[Any], Any]:
    trainer = build_trainer(CASE.but(**HABITS[habit]), strategy, CPU, ddp=ddp)
    with trainer.wrapper.engine.runtime.watch():
        numbers = [_step(trainer, 0), habit(trainer, 1), habit(trainer, 2), _step(trainer, 3)]
    return numbers, trainer.params()


def _compare(rank: int, world: int, strategies: tuple[str, ...]) -> int:
    building.make_runtime = lambda device: RecordingRuntime()  # type: ignore[assignment]
    init_megatron()
    for strategy in strategies:
        for habit in HABITS:
            expected, weights = _trained(habit, {}, strategy)
            found, mine = _trained(habit, OFFLOAD, strategy)
            said = f"{strategy}, {habit.__name__}"
            assert repr(found) == repr(expected), said
            assert not any(value.isnan().any() for value in weights.values()), said
            assert all(torch.equal(mine[name], weights[name]) for name in weights), said
    return len(HABITS)


@pytest.mark.once
def test_whatever_a_loop_does_around_steps_has_the_bits_of_steps_that_wait() -> None:
    assert run_ranks(_compare, 1, ("optim_grads_params",)) == [len(HABITS)]


@pytest.mark.full
def test_on_two_ranks_under_every_strategy() -> None:
    run_ranks(_compare, 2, tuple(STRATEGIES), timeout=400.0)
