"""Training loops as users of PyTorch write them. Each runs as it stands on sharded models and on
unsharded ones whose losses are the mean over all ranks' data, and must leave the same weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tests.distributed.plain import LR, STEPS, Loop, Make, Side, net, plain_sgd
from tests.distributed.plain_state_loops import STATE_LOOPS

OPTIMIZERS: Mapping[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}

LOOPS: dict[str, Loop] = {**STATE_LOOPS}


def loop(function: Loop) -> Loop:
    """Puts it into the table, by its name."""
    LOOPS[function.__name__] = function
    return function


# Gradients that are cleared, replaced, scaled and clipped, and ranks that have none.


def _microbatches(side: Side, make: Make, microbatches: int, clip: float | None) -> None:
    for step, model, optimizer in side.steps(make):
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            with nullcontext() if last else side.no_sync(model):
                loss = side.loss(model, step, microbatch) / microbatches
                loss.backward()
            side.note(loss)
        if clip is not None:
            side.clip(model, clip)
        optimizer.step()
        optimizer.zero_grad()


@loop
def microbatches_and_clipping(side: Side) -> None:
    _microbatches(side, OPTIMIZERS["AdamW"], 1, None)
    assert side.numbers[-1] < side.numbers[0], "it learns"
    _microbatches(side, OPTIMIZERS["AdamW"], 3, 0.5)


@loop
def optimizers_of_torch(side: Side) -> None:
    for make in OPTIMIZERS.values():
        _microbatches(side, make, 2, None)


@loop
def optimizers_over_dtensors(side: Side) -> None:
    """Of torch, not passed to fully_shard_optimizer, whose steps read rows or whole tensors;
    gradients are cleared after or before."""
    for make in (
        OPTIMIZERS["AdamW"], functools.partial(plain_sgd, foreach=False), OPTIMIZERS["Rprop"],
    ):  # fmt: skip
        model = side.model()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            side.step(model, optimizer, step)


def _to_none(model: Any) -> None:
    for param in model.parameters():
        param.grad = None


@loop
def gradients_that_a_module_clears(side: Side) -> None:
    """Or the program, one by one."""
    for clear in (_to_none, lambda model: side.inner(model).zero_grad()):
        for step, model, optimizer in side.steps():
            side.loss(model, step).backward()
            optimizer.step()
            clear(model)


@loop
def cleared_between_forward_and_backward(side: Side) -> None:
    for step, model, optimizer in side.steps():
        loss = side.loss(model, step)
        optimizer.zero_grad() if step % 2 else model.zero_grad()
        loss.backward()
        optimizer.step()


@loop
def gradients_that_are_thrown_away(side: Side) -> None:
    """After microbatches, and after a backward."""
    for step, model, optimizer in side.steps():
        with side.no_sync(model):
            side.loss(model, step, 7).backward()
        optimizer.zero_grad()
        side.loss(model, step, 8).backward()
        _to_none(model)
        side.step(model, optimizer, step)


@loop
def some_gradients_taken_away(side: Side) -> None:
    """Other parameters in every step, of the same unit and of others."""
    for step, model, optimizer in side.steps():
        side.loss(model, step).backward()
        for param in list(model.parameters())[step % 3 :: 3]:
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()


def _replaced(side: Side, microbatches: int) -> None:
    for step, model, optimizer in side.steps():
        for microbatch in range(microbatches):
            side.loss(model, step, microbatch).backward()
            for param in model.parameters():
                param.grad = param.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()


LOOPS |= {
    "gradients_replaced": functools.partial(_replaced, microbatches=1),
    "gradients_replaced_between_backwards": functools.partial(_replaced, microbatches=2),
}


@loop
def clipped_after_an_evaluation(side: Side) -> None:
    for step, model, optimizer in side.steps():
        before = list(map(id, model.parameters()))
        side.loss(model, step).backward()
        with torch.no_grad():
            side.note(side.loss(model, step, 1))
        for module in (model, side.inner(model)):
            assert list(map(id, module.parameters())) == before
        side.note(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            side.note(side.loss(model, step, 2))


@loop
def clipped_by_norms(side: Side) -> None:
    """By torch and by the model, in turn."""
    for norm_type in (float("inf"), 1.0, 2.0, 3.0):
        for step, model, optimizer in side.steps():
            side.loss(model, step).backward()
            if step % 2 and norm_type < float("inf"):
                params = model.parameters()
                side.note(nn.utils.clip_grad_norm_(params, 0.05, norm_type, foreach=step != 3))
            else:
                side.clip(model, 0.05, norm_type)
            optimizer.step()
            optimizer.zero_grad()


@loop
def a_rank_without_data(side: Side) -> None:
    """In the first step and a later one the first rank takes part by steps alone. A step that no
    gradients came before, on any rank, moves nothing."""
    for step, model, optimizer in side.steps():
        without = 1 - step % 2
        if side.strategy is None or side.rank >= without:
            side.loss(model, step, without=without).backward()
        side.clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


@loop
def a_rank_without_microbatches(side: Side) -> None:
    """As `a_rank_without_data`, in every other step, where others accumulate gradients."""
    for step, model, optimizer in side.steps():
        without = step % 2
        if side.strategy is None or side.rank >= without:
            with side.no_sync(model):
                side.loss(model, step, 0, without=without).backward()
            side.loss(model, step, 1, without=without).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop
def a_module_inside_is_called(side: Side) -> None:
    """One that holds all parameters, in place of the model in every other step."""
    model = side.model(nn.Sequential(net(blocks=2)))
    optimizer = side.sgd(model.parameters())
    for step in range(STEPS):
        side.step(side.inner(model)[0] if step % 2 else model, optimizer, step)


@loop
def nested_no_sync(side: Side) -> None:
    for step, model, optimizer in side.steps():
        with side.no_sync(model):
            with side.no_sync(model):
                side.loss(model, step, 1).backward()
            side.loss(model, step, 2).backward()
        side.step(model, optimizer, step)


# Several optimizers, and steps of other kinds.


def _step_both(side: Side, split: Callable[[Any], tuple[Any, Any]], every: int = 1) -> None:
    """Two optimizers of the parameters that `split` gives, the second in every `every`th step."""
    model = side.model()
    first, second = map(side.sgd, split(model))
    for step in range(STEPS):
        side.step(model, first, step)
        if step % every == every - 1:
            second.step()
            second.zero_grad()


def _halves(model: Any) -> tuple[Any, Any]:
    """Of every unit."""
    params = list(model.parameters())
    return params[::2], params[1::2]


def _whole_units(model: Any) -> tuple[Any, Any]:
    blocks = list(getattr(model, "module", model).blocks.parameters())
    return blocks, [p for p in model.parameters() if all(p is not one for one in blocks)]


LOOPS |= {
    "two_optimizers": functools.partial(_step_both, split=_halves),
    "two_optimizers_of_whole_units": functools.partial(_step_both, split=_whole_units),
    # Its gradients add up meanwhile, which needs sharded gradients.
    "an_optimizer_every_other_step": functools.partial(_step_both, split=_halves, every=2),
}


@loop
def groups_added_later(side: Side) -> None:
    for step, model, optimizer in side.steps(lambda params: plain_sgd(list(params)[::2])):
        later = list(model.parameters())[1::2]
        if step == 2:
            optimizer.add_param_group({"params": later, "lr": 0.5 * LR})
        side.step(model, optimizer, step)
        for param in later:
            param.grad = None


def _two_groups(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    groups = [{"params": every[::2], "lr": 0.02}, {"params": every[1::2]}]
    return torch.optim.Adam(groups, lr=0.01, amsgrad=True)


@loop
def scheduled_clipped_and_written(side: Side) -> None:
    """A scheduler from before the optimizer is sharded, clipping, a closure, writes to parameters
    between steps; moments at the end."""
    for make in (OPTIMIZERS["AdamW"], _two_groups):
        model = side.model()
        plain = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
        optimizer = side.optimizer(plain)
        for step in range(STEPS):

            def closure(step: int = step, model: Any = model, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = side.loss(model, step)
                loss.backward()
                side.note(loss)
                return loss

            if step == 2:
                side.note(optimizer.step(closure))
            else:
                closure()
                side.clip(model, 0.5)
                optimizer.step()
            scheduler.step()
            with torch.no_grad():
                if step == 1:
                    _scale(model.parameters(), 0.9)
                side.note(side.loss(model, 9))
        side.numbers += [group["lr"] for group in optimizer.param_groups]
        for state in optimizer.state.values():
            for value in state.values():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                side.note(whole.double().abs().sum())


@loop
def scaled_losses(side: Side) -> None:
    """One step in four has an infinite gradient."""
    model = side.model()
    plain = plain_sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.7)
    optimizer = side.optimizer(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        loss = side.loss(model, step)
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        side.numbers.append(scaler.get_scale())
        optimizer.zero_grad()


class Cautious(torch.optim.SGD):
    """Steps by its base's step, and does something of its own before and after."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            param.grad = param.grad * 0.5
        result = super().step(closure)
        _scale((param for group in self.param_groups for param in group["params"]), 0.99)
        return result


@loop
def a_step_that_calls_its_base(side: Side) -> None:
    plain_sgd([nn.Parameter(torch.ones(1))])  # torch hooks the base's step when one is made
    for step, model, optimizer in side.steps(lambda params: Cautious(params, lr=LR)):
        side.step(model, optimizer, step)


@loop
def step_in_backward(side: Side) -> None:
    model = side.model()
    optimizers = {param: side.sgd([param]) for param in model.parameters()}

    def hook(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    for step in range(STEPS):
        side.loss(model, step).backward()


# Weights that are written, and frozen.


@torch.no_grad()
def _scale(params: Iterable[Any], factor: float) -> None:
    for param in params:
        param.mul_(factor)


@loop
def initialized_after_wrapping(side: Side) -> None:
    for step, model, optimizer in side.steps():
        if step == 0:
            model.apply(lambda module: _scale(module.parameters(recurse=False), 0.5))
        loss = side.loss(model, step)
        side.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@loop
def averaged_weights_evaluated(side: Side) -> None:
    """Other weights are swapped in for an evaluation, and back, by a list of before."""
    model = side.model()
    params = list(model.parameters())
    optimizer = side.sgd(params)
    average = [param.detach().clone() for param in params]
    for step in range(STEPS):
        side.step(model, optimizer, step)
        with torch.no_grad():
            kept = [param.detach().clone() for param in params]
            for param, mean in zip(params, average, strict=True):
                mean.lerp_(param, 0.3)
                param.copy_(mean)
            for microbatch in range(2):
                side.note(side.loss(model, step, microbatch))
            for param, value in zip(params, kept, strict=True):
                param.copy_(value)


@loop
def clamped(side: Side) -> None:
    """After each step, and after the evaluation that follows it."""
    for step, model, optimizer in side.steps():
        side.step(model, optimizer, step)
        for bound in (0.4, 0.3):
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-bound, bound)
                side.note(side.loss(model, step, 1))


@loop
def frozen_between_backwards(side: Side) -> None:
    """Of one step: gradients of the first stay, and the optimizer takes them."""
    for step, model, optimizer in side.steps():
        block = side.inner(model).blocks[0]
        with side.no_sync(model):
            side.loss(model, step).backward()
        block.requires_grad_(False)
        side.loss(model, step, 1).backward()
        block.requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()


@loop
def layers_frozen_in_turn(side: Side) -> None:
    """By lists of before; half of each unit's parameters, and whole units."""
    model = side.model()
    params = list(model.parameters())
    optimizer = side.optimizer(torch.optim.AdamW(params, lr=0.01, weight_decay=0.3))
    for step in range(STEPS):
        for number, param in enumerate(params):
            param.requires_grad_(number % 2 == step % 2 if step < 2 else number > 5)
        side.step(model, optimizer, step)


# Units that a step does not use.


@loop
def a_block_left_out_at_times(side: Side) -> None:
    """Torch's optimizer, not passed to fully_shard_optimizer, clears the gradients that there are;
    of the block that a step leaves out there are none."""
    model = side.model()
    optimizer = plain_sgd(model.parameters())
    blocks = side.inner(model).blocks
    for step in range(STEPS):
        blocks.forward = blocks[1 - step % 2 :].forward
        side.step(model, optimizer, step)
