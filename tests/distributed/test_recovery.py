"""A forward or backward that raises leaves the wrapper able to run the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.checks import check_loss, check_norm, check_weights
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.distributed.habits import inner_model
from tests.distributed.launch import run_ranks
from tests.distributed.random_cases import fresh_seed, random_case


class Mishap(Exception):
    """What the user's hook raises."""


def _raise(*_: Any) -> None:
    raise Mishap


def _raise_in_backward(module: nn.Module, args: Any, output: Any) -> None:
    tensor = output if isinstance(output, torch.Tensor) else output[0]
    tensor.register_hook(_raise)


@contextmanager
def _hook(module: nn.Module, call: int, act: Callable[..., None]) -> Iterator[None]:
    """`act` runs after the `call`-th forward of `module`."""
    calls = 0

    def hook(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            act(*args)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _mlp_of_layer(model: Any) -> nn.Module:
    return model.decoder.layers[1].mlp.linear_fc2


MISHAPS: dict[str, tuple[Callable[[Any], nn.Module], int, Callable[..., None]]] = {
    # where, in which of its calls, and what happens
    "forward, inside a layer": (_mlp_of_layer, 1, _raise),
    "forward, after a layer": (lambda model: model.decoder.layers[0], 1, _raise),
    "forward, in the embedding": (lambda model: model.embedding, 1, _raise),
    "forward of the second microbatch": (_mlp_of_layer, 2, _raise),
    "forward, after the model": (lambda model: model, 3, _raise),
    "backward, after a layer": (lambda model: model.decoder.layers[1], 1, _raise_in_backward),
    "backward, inside a layer": (_mlp_of_layer, 1, _raise_in_backward),
    "backward of the last microbatch": (_mlp_of_layer, 3, _raise_in_backward),
    "backward, at the model's output": (lambda model: model, 1, _raise_in_backward),
}


def _storage_of_gathered_weights(trainer: Trainer) -> int:
    units = trainer.wrapper.engine.units
    buffers = [group.weights[0].tensor for unit in units for group in unit.groups]
    return sum(buffer.untyped_storage().nbytes() for buffer in buffers)


def _fail(trainer: Trainer, name: str, data: list[torch.Tensor]) -> None:
    where, call, act = MISHAPS[name]
    module = where(inner_model(trainer.wrapper))
    with _hook(module, call, act), pytest.raises(Mishap):
        forward_backward(trainer, data)


def _evaluation_loss(trainer: Trainer, rank: int, device: torch.device) -> float:
    with torch.no_grad():
        return forward_backward(trainer, batches(trainer.case, 50, rank, device), forward_only=True)


def _run(
    trainer: Trainer, rank: int, device: torch.device, mishaps: list[str]
) -> list[tuple[float, ...]]:
    """A step, then after each mishap an evaluation without any clean-up and a step."""
    case = trainer.case
    results: list[tuple[float, ...]] = [train_step(trainer, batches(case, 0, rank, device))]
    for number, name in enumerate(mishaps, start=1):
        if trainer.strategy is not None:
            _fail(trainer, name, batches(case, 90 + number, rank, device))
        evaluation = _evaluation_loss(trainer, rank, device)
        if trainer.strategy == "optim_grads_params":
            trainer.wrapper.stop_communication()  # on the host a release waits in a queue
            assert _storage_of_gathered_weights(trainer) == 0, name
        step = train_step(trainer, batches(case, number, rank, device))
        results.append((*step, evaluation))
    return results


def _recovers(rank: int, world: int, case: Case, mishaps: list[str]) -> None:
    device = init_megatron()
    reference = build_trainer(case, None, device)
    expected = _run(reference, rank, device, mishaps)
    weights = reference.params()
    for strategy in STRATEGIES:
        trainer = build_trainer(case, strategy, device)
        label = f"{strategy} on {world} ranks, {mishaps}, {case}"
        for ours, theirs in zip(_run(trainer, rank, device, mishaps), expected, strict=True):
            check_loss(ours[0], theirs[0], label)
            check_norm(ours[1], theirs[1], label, 1e-5)
            check_loss(sum(ours[2:]), sum(theirs[2:]), label)
        check_weights(trainer.params(), weights, label)


@pytest.mark.parametrize(
    "overlap",
    (True, pytest.param(False, marks=pytest.mark.full)),
    ids=("overlap", "no-overlap"),
)
@pytest.mark.parametrize("part", ("forward", "backward"))
def test_next_step_equals_that_of_a_run_without_the_exception(part: str, overlap: bool) -> None:
    """The exception is raised on all ranks, by a user's hook; the reference never has one. Between
    the exception and the next step comes an evaluation, before anything is cleaned up."""
    mishaps = [name for name in MISHAPS if name.startswith(part)]
    case = random_case(fresh_seed()).but(num_layers=2, batch=1, overlap=overlap)
    run_ranks(_recovers, 2, case, mishaps)


def _direct_call_after(rank: int, world: int, case: Case) -> None:
    device = init_megatron()
    for strategy in STRATEGIES:
        trainer, expected = (build_trainer(case, strategy, device) for _ in range(2))
        data = batches(case, 0, rank, device)
        _fail(trainer, "forward, inside a layer", data)
        losses = []
        for one in (trainer, expected):
            model = inner_model(one.wrapper)
            tokens = data[0]
            positions = torch.arange(case.seq).expand(case.batch, -1)
            mask = torch.ones(case.seq, case.seq, dtype=torch.bool).triu(1)[None, None]
            one.wrapper.zero_grad_buffer()
            loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
            loss.backward()
            one.wrapper.finish_grad_sync()
            one.optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1], (strategy, losses, case)
        check_weights(trainer.params(), expected.params(), f"{strategy}, {case}", 0.0)


def test_inner_model_can_be_called_after_the_wrapper_raised() -> None:
    """The failed pass began at the wrapper, the next one begins further inside."""
    run_ranks(_direct_call_after, 2, random_case(fresh_seed()).but(num_layers=2, batch=1))
