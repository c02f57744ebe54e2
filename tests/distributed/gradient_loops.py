"""Loops that clear, replace, scale and clip gradients, and ranks that have none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tests.distributed.plain_side import STEPS, Loop, Side, plain_sgd


def grads_to_none(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None


def plain_optimizer(side: Side) -> None:
    """Of torch, over the DTensors."""
    model = side.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_optimizer_one_by_one(side: Side) -> None:
    model = side.model()
    optimizer = plain_sgd(model.parameters(), foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        side.loss(model, step).backward()
        optimizer.step()


def module_zero_grad(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        optimizer.step()
        side.inner(model).zero_grad()


def cleared_between_forward_and_backward(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        loss = side.loss(model, step)
        optimizer.zero_grad() if step % 2 else model.zero_grad()
        loss.backward()
        optimizer.step()


def gradients_that_are_thrown_away(side: Side) -> None:
    """After microbatches, and after a backward."""
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        with side.no_sync(model):
            side.loss(model, step, 7).backward()
        optimizer.zero_grad()
        side.loss(model, step, 8).backward()
        for param in model.parameters():
            param.grad = None
        side.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def some_gradients_taken_away(side: Side) -> None:
    """Other parameters in every step, of the same unit and of others."""
    model = side.model()
    optimizer = side.sgd(model.parameters())
    params = list(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        for param in params[step % 3 :: 3]:
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()


def gradients_replaced(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        for param in model.parameters():
            param.grad = param.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()


def gradients_replaced_between_backwards(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        for microbatch in range(2):
            side.loss(model, step, microbatch).backward()
            for param in model.parameters():
                param.grad = param.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()


def clipped_after_an_evaluation(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    before = list(model.parameters())
    for step in range(STEPS):
        side.loss(model, step).backward()
        with torch.no_grad():
            side.note(side.loss(model, step, 1))
        after = list(model.parameters())
        assert all(one is other for one, other in zip(before, after, strict=True))
        inner = list(side.inner(model).parameters())
        assert all(one is other for one, other in zip(before, inner, strict=True))
        side.note(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            side.note(side.loss(model, step, 2))


def clipped_by_norms(side: Side) -> None:
    """By torch and by the model, in turn."""
    for norm_type in (float("inf"), 1.0, 2.0, 3.0):
        model = side.model()
        optimizer = side.sgd(model.parameters())
        for step in range(STEPS):
            side.loss(model, step).backward()
            if (step % 2 and norm_type < float("inf")) or side.strategy is None:
                params = model.parameters()
                norm = nn.utils.clip_grad_norm_(params, 0.05, norm_type, foreach=step != 3)
            else:
                norm = model.clip_grad_norm_(0.05, norm_type)
            side.note(norm)
            optimizer.step()
            optimizer.zero_grad()


def a_rank_without_data(side: Side) -> None:
    """In the first step and a later one the first rank takes part by steps alone. A step that no
    gradients came before, on any rank, moves nothing."""
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        without = 1 - step % 2
        if side.strategy is None or side.rank >= without:
            side.loss(model, step, without=without).backward()
        if side.strategy is None:
            side.note(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        else:
            side.note(model.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


def a_rank_without_microbatches(side: Side) -> None:
    """As `a_rank_without_data`, in every other step, where others accumulate gradients."""
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        without = step % 2
        if side.strategy is None or side.rank >= without:
            with side.no_sync(model):
                side.loss(model, step, 0, without=without).backward()
            side.loss(model, step, 1, without=without).backward()
        optimizer.step()
        optimizer.zero_grad()


def nested_no_sync(side: Side) -> None:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        with side.no_sync(model):
            with side.no_sync(model):
                side.loss(model, step, 0).backward()
            side.loss(model, step, 1).backward()
        side.loss(model, step, 2).backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: Mapping[str, Loop] = {
    loop.__name__: loop
    for loop in (
        grads_to_none, plain_optimizer, plain_optimizer_one_by_one, module_zero_grad,
        cleared_between_forward_and_backward, gradients_that_are_thrown_away,
        some_gradients_taken_away, gradients_replaced, gradients_replaced_between_backwards,
        clipped_after_an_evaluation, clipped_by_norms, a_rank_without_data,
        a_rank_without_microbatches, nested_no_sync,
    )
}  # fmt: skip
