"""Gradients that a backward leaves which raises, or which passes no output of the model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import fully_shard, fully_shard_model
from tests.lib.gpt.gpt import full
from tests.lib.plain.fsdp2_shapes import model
from tests.lib.plain.plain import Block, tokens
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "plain/left_grads.py",
    "plain/user_loop.py",
    "core/engine/grad_callbacks.py",
    "core/engine/step.py",
)


def _sharded() -> Any:
    made = model()
    for block in made.blocks:
        fully_shard(block)
    return fully_shard(made)


def _loss(made: Any, number: int) -> torch.Tensor:
    return made(tokens(number, 0, 0)).mean()


def _raise(grad: torch.Tensor) -> None:
    raise KeyError("a backward that raises")


def _put_hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(_raise)


def _raises_at_block(made: Any, number: int, at: int = 0) -> None:
    """A backward that raises after the gradients of the blocks behind block `at`."""
    hook = made.blocks[at].register_forward_hook(_put_hook)
    loss = _loss(made, number)
    hook.remove()
    with suppress(KeyError):
        loss.backward()


def _raises_at_once(made: Any, number: int) -> None:
    """A backward that raises before any gradient of a weight."""
    loss = _loss(made, number)
    loss.register_hook(_raise)
    with suppress(KeyError):
        loss.backward()


def _grads(made: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in made.named_parameters():
        if param.grad is not None:
            found[name] = full(param.grad)
    return found


def _check(made: Any, *numbers: int) -> None:
    """Gradients are those of these losses alone."""
    whole = model()
    for number in numbers:
        _loss(whole, number).backward()
    torch.testing.assert_close(_grads(made), _grads(whole))


@on_ranks(2)
def test_a_backward_that_raised_is_forgotten(rank: int) -> None:
    """By the forward that follows, also where there were gradients to which it has added none."""
    made = _sharded()
    for earlier in ((), (0,)):
        for number in earlier:
            _loss(made, number).backward()
        _raises_at_once(made, 1)
        if not earlier:
            _raises_at_block(made, 1)
        _loss(made, 2).backward()
        _check(made, *earlier, 2)
        made.zero_grad()


@on_ranks(2)
def test_a_backward_that_raised_is_forgotten_by_another_backward(rank: int) -> None:
    """Both forwards came before."""
    made = _sharded()
    other = _loss(made, 1)
    _raises_at_block(made, 0)
    other.backward()
    _check(made, 1)


@on_ranks(2)
def test_a_backward_that_raised_is_forgotten_by_a_norm(rank: int) -> None:
    made = fully_shard_model(model(), None, [Block], data_parallel_sharding_strategy="optim_grads")
    _raises_at_block(made.module, 0)
    assert made.clip_grad_norm_(1.0) == 0.0
    assert _grads(made) == {}


Use = Callable[[Any, torch.optim.Optimizer], Any]

USES: dict[str, Use] = {
    "a forward": lambda made, optimizer: _loss(made, 2),
    "a step": lambda made, optimizer: optimizer.step(),
}


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_gradients_that_were_added_to_earlier_ones_cannot_be_used(rank: int, use: str) -> None:
    """Until all of them are forgotten."""
    made = _sharded()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for microbatches in (False, True):
        made.set_requires_gradient_sync(not microbatches)
        _loss(made, 0).backward()
        made.set_requires_gradient_sync(True)
        _raises_at_block(made, 1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="to those of an earlier backward"):
                USES[use](made, optimizer)
        if microbatches:
            made.reset_iter_state()
        optimizer.zero_grad()
        _loss(made, 2).backward()
        _check(made, 2)
        optimizer.zero_grad()


def _raises_in_forward(made: Any, number: int) -> None:
    hook = made.blocks[1].register_forward_pre_hook(lambda *_: {}["a forward that raises"])
    with suppress(KeyError):
        _loss(made, number)
    hook.remove()


@pytest.mark.parametrize("raises", [_raises_in_forward, _raises_at_once])
@on_ranks(2)
def test_a_reset_keeps_what_is_in_grad(rank: int, raises: Callable[[Any, int], None]) -> None:
    """And no sum that is not there yet. In the last step one block is reduced, and no other."""
    made = _sharded()
    for _ in range(2):
        _loss(made, 0).backward()
        made.set_requires_gradient_sync(False)
        _loss(made, 1).backward()
        made.set_requires_gradient_sync(True)
        raises(made, 2)
        made.reset_iter_state()
        _check(made, 0)
        _loss(made, 3).backward()
        _check(made, 0, 3)
        made.zero_grad()
    made.set_requires_gradient_sync(False)
    made.blocks[0].set_requires_gradient_sync(True)
    _loss(made, 4).backward()
    own = {name: grad for name, grad in _grads(made).items() if "blocks.0" in name}
    raises(made, 5)
    made.reset_iter_state()
    torch.testing.assert_close(_grads(made), own)
    assert own


@on_ranks(2)
def test_a_backward_of_a_model_that_was_deleted(rank: int) -> None:
    made: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    fully_shard(made[0])
    loss = fully_shard(made)(torch.ones(2, 4)).sum()
    del made
    gc.collect()
    with pytest.raises(RuntimeError, match="its model was deleted before the backward"):
        loss.backward()


@on_ranks(2)
def test_a_loss_of_a_weight_that_passes_no_output(rank: int) -> None:
    """Its gradient counts beside the model's loss, and by itself is an error."""
    made = _sharded()
    penalty: list[torch.Tensor] = []
    made.head.register_forward_hook(lambda m, *_: penalty.append(m.weight.square().sum()))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    loss = _loss(made, 0)
    penalty[-1].backward()
    loss.backward()
    whole = model()
    (_loss(whole, 0) + whole.head.weight.square().sum()).backward()
    torch.testing.assert_close(_grads(made), _grads(whole))
    optimizer.zero_grad()
    _loss(made, 1)
    penalty[-1].backward()
    with pytest.raises(RuntimeError, match="through no output of the model"):
        optimizer.step()
    nn.Module.zero_grad(made)
