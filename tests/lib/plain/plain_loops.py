"""Training loops as users of PyTorch write them. Each runs as it stands on sharded models and on
unsharded ones whose losses are the mean over all ranks' data, and must leave the same weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

from tests.lib.plain.late_gradients import LATE_LOOPS
from tests.lib.plain.later_torch import IS_OLDEST
from tests.lib.plain.plain import LR, STEPS, Loop, Make, Side, net, plain_sgd
from tests.lib.plain.plain_state_loops import STATE_LOOPS

OPTIMIZERS: Mapping[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
}

LOOPS: dict[str, Loop] = {**STATE_LOOPS, **LATE_LOOPS}


def loop(function: Loop) -> Loop:
    """Puts it into the table, by its name."""
    LOOPS[function.__name__] = function
    return function


Act = Callable[[Side, Any, Any, int], Any]
"""Of (side, model, optimizer, number of the step)."""


def nothing(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Does nothing."""


def zero_grad(side: Side, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()


def _trained(
    side: Side,
    make: Make = plain_sgd,
    wraps: bool = True,
    backwards: int = 1,
    before: Act = nothing,
    between: Act = nothing,
    changed: Act = nothing,
    clear: Act = zero_grad,
    after: Act = nothing,
) -> None:
    """Steps with something before them, between a forward and its backward, after each backward,
    and after the step. wraps: by fully_shard_optimizer; clear: in place of the optimizer's."""
    model = side.model()
    optimizer = make(model.parameters())
    if wraps:
        optimizer = side.optimizer(optimizer)
    for step in range(STEPS):
        before(side, model, optimizer, step)
        for microbatch in range(backwards):
            loss = side.loss(model, step, microbatch)
            between(side, model, optimizer, step)
            loss.backward()
            changed(side, model, optimizer, step)
        optimizer.step()
        clear(side, model, optimizer, step)
        after(side, model, optimizer, step)


# Gradients that are cleared, replaced, scaled and clipped, and ranks that have none.


def microbatched(side: Side, make: Make, microbatches: int, clip: float | None = None) -> None:
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
    microbatched(side, OPTIMIZERS["AdamW"], 1)
    assert side.numbers[-1] < side.numbers[0], "it learns"
    microbatched(side, OPTIMIZERS["AdamW"], 3, 0.5)


@loop
def optimizers_of_torch(side: Side) -> None:
    for make in OPTIMIZERS.values():
        microbatched(side, make, 2)


def _to_none(side: Side, model: Any, optimizer: Any, step: int) -> None:
    for param in model.parameters():
        param.grad = None


def _inner_clears(side: Side, model: Any, optimizer: Any, step: int) -> None:
    side.inner(model).zero_grad()


def _clears_one_of_both(side: Side, model: Any, optimizer: Any, step: int) -> None:
    if step % 2:
        optimizer.zero_grad()
    else:
        model.zero_grad()


def _thrown_away(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Gradients of a microbatch, and of a whole backward."""
    with side.no_sync(model):
        side.loss(model, step, 7).backward()
    optimizer.zero_grad()
    side.loss(model, step, 8).backward()
    _to_none(side, model, optimizer, step)


def _some_taken_away(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Other parameters' in every step, of the same unit and of others."""
    for param in list(model.parameters())[step % 3 :: 3]:
        param.grad = None


def _halved(side: Side, model: Any, optimizer: Any, step: int) -> None:
    for param in model.parameters():
        param.grad = param.grad * 0.5


def _evaluated_and_clipped(side: Side, model: Any, optimizer: Any, step: int) -> None:
    known = [*map(id, optimizer.param_groups[0]["params"])]
    with torch.no_grad():
        side.note(side.loss(model, step, 1))
    for module in (model, side.inner(model)):
        assert [*map(id, module.parameters())] == known
    side.note(nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def _evaluated(side: Side, model: Any, optimizer: Any, step: int) -> None:
    with torch.inference_mode():
        side.note(side.loss(model, step, 2))


def _clipped(side: Side, model: Any, optimizer: Any, step: int, norm_type: float) -> None:
    """By torch and by the model, in turn."""
    if step % 2 and norm_type < float("inf"):
        params = model.parameters()
        side.note(nn.utils.clip_grad_norm_(params, 0.05, norm_type, foreach=step != 3))
    else:
        side.clip(model, 0.05, norm_type)


def _two_nested(side: Side, model: Any, optimizer: Any, step: int) -> None:
    with side.no_sync(model):
        with side.no_sync(model):
            side.loss(model, step, 1).backward()
        side.loss(model, step, 2).backward()


def _block_left_out(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Of a block that a step leaves out there are no gradients."""
    blocks = side.inner(model).blocks
    blocks.forward = blocks[1 - step % 2 :].forward


def _data_of_grads_assigned(side: Side, model: Any, optimizer: Any, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data = param.grad.data * 0.5


def _data_exchanged(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """Evaluates other weights, puts the trained ones back as a program with averaged weights does,
    and clamps those."""
    params = [*model.parameters()]
    trained = [param.data for param in params]
    for param in params:
        param.data = param.data * 0.9
    _evaluated(side, model, optimizer, step)
    for param, before in zip(params, trained, strict=True):
        param.data = before
        param.data = param.data.clamp(-0.2, 0.2)


def _trained_with(name: str, **how: Any) -> None:
    """Adds a loop: the plain one, of which some is done otherwise."""
    LOOPS[name] = functools.partial(_trained, **how)


# Optimizers of torch, not passed to fully_shard_optimizer, step on rows or whole tensors.
_trained_with("AdamW_over_dtensors", make=OPTIMIZERS["AdamW"], wraps=False, before=zero_grad)
_trained_with("SGD_over_dtensors", make=functools.partial(plain_sgd, foreach=False), wraps=False)
if not IS_OLDEST:  # it has no such operator of DTensors
    _trained_with("Rprop_over_dtensors", make=OPTIMIZERS["Rprop"], wraps=False)
_trained_with("a_block_left_out_at_times", wraps=False, before=_block_left_out)
_trained_with("gradients_that_the_program_clears", clear=_to_none)
_trained_with("gradients_that_a_module_clears", clear=_inner_clears)
_trained_with("cleared_between_forward_and_backward", between=_clears_one_of_both, clear=nothing)
_trained_with("gradients_that_are_thrown_away", before=_thrown_away)
_trained_with("some_gradients_taken_away", changed=_some_taken_away)
_trained_with("gradients_replaced", changed=_halved)
_trained_with("data_assigned", changed=_data_of_grads_assigned, after=_data_exchanged)
_trained_with("gradients_replaced_between_backwards", changed=_halved, backwards=2)
_trained_with("clipped_after_an_evaluation", changed=_evaluated_and_clipped, after=_evaluated)
for _norm in (float("inf"), 1.0, 2.0, 3.0):
    _clip = functools.partial(_clipped, norm_type=_norm)
    _trained_with(f"clipped_by_norm_{_norm}", changed=_clip)
_trained_with("nested_no_sync", make=OPTIMIZERS["AdamW"], before=_two_nested, after=_evaluated)


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
    """As `a_rank_without_data`, where others accumulate gradients."""
    for step, model, optimizer in side.steps():
        without = 1 - step % 2
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
        called = side.inner(model)[0] if step % 2 else model
        side.step(called, optimizer, step)


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


def _two_groups(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    groups = [{"params": every[::2], "lr": 0.02}, {"params": every[1::2]}]
    return torch.optim.Adam(groups, lr=0.01, amsgrad=True)


@loop
def scheduled_and_clipped(side: Side) -> None:
    """A scheduler from before the optimizer is sharded, clipping, a closure."""
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
        side.numbers += [group["lr"] for group in optimizer.param_groups]


def _scaled(side: Side, make: Make, unscales: bool) -> None:
    """One step in four has an infinite gradient."""
    model = side.model()
    plain = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.7)
    optimizer = side.optimizer(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        loss = side.loss(model, step)
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        side.numbers.append(scaler.get_scale())
        optimizer.zero_grad()


def _fused_adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    """An optimizer that a scaler gives the scale and whether a gradient is infinite. Its step is
    called in any case, and does nothing then."""
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3, fused=True)


LOOPS |= {
    "scaled_losses": functools.partial(_scaled, make=plain_sgd, unscales=True),
    "scaled_losses_and_a_fused_optimizer": functools.partial(
        _scaled, make=_fused_adamw, unscales=False
    ),
}


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


def _cautious(params: Iterable[Any]) -> torch.optim.Optimizer:
    plain_sgd([nn.Parameter(torch.ones(1))])  # torch hooks the base's step when one is made
    return Cautious(params, lr=LR)


LOOPS["a_step_that_calls_its_base"] = functools.partial(_trained, make=_cautious)


class Counter(torch.optim.Optimizer):
    """Counts steps outside of its state, looks at its first parameter, and returns a number: a
    second call for one step would be seen, and so would one without parameters."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": LR})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> float:
        self.steps += 1
        rate = torch.full_like(self.param_groups[0]["params"][0], LR / self.steps).max()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(rate * param.grad)
        return rate.item()


@loop
def an_optimizer_that_counts_its_steps(side: Side) -> None:
    for step, model, optimizer in side.steps(Counter):
        side.loss(model, step).backward()
        side.numbers.append(optimizer.step())
        optimizer.zero_grad()


def _halve(param: Any) -> None:
    param.grad.mul_(0.5)


def _hooks_and_all_blocks(side: Side, model: Any, optimizer: Any, step: int) -> None:
    for param in model.parameters() if step == 0 else ():
        param.register_post_accumulate_grad_hook(_halve)
    blocks = side.inner(model).blocks
    blocks.forward = blocks[:].forward


def _last_block_left_out(side: Side, model: Any, optimizer: Any, step: int) -> None:
    blocks = side.inner(model).blocks
    blocks.forward = blocks[:-1].forward


# The second backward of a step gives no gradient to a block: its hooks do not run again.
_trained_with(
    "hooks_of_what_a_backward_reaches",
    backwards=2,
    before=_hooks_and_all_blocks,
    changed=_last_block_left_out,
)


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


def _initialized(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """After wrapping."""
    if step == 0:
        model.apply(lambda module: _scale(module.parameters(recurse=False), 0.5))


def _clamped(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """After each step, and after the evaluation that follows it, by a list of before."""
    for bound in (0.4, 0.3):
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"]:
                param.clamp_(-bound, bound)
            side.note(side.loss(model, step, 1))


def _frozen_later(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """For the second backward of a step: gradients of the first stay, the optimizer takes them."""
    with side.no_sync(model):
        side.loss(model, step, 1).backward()
    side.inner(model).blocks[0].requires_grad_(False)


def _trained_again(side: Side, model: Any, optimizer: Any, step: int) -> None:
    side.inner(model).blocks[0].requires_grad_(True)


def _frozen_in_turn(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """By a list of before; half of each unit's parameters, and whole units."""
    for number, param in enumerate(optimizer.param_groups[0]["params"]):
        param.requires_grad_(number % 2 == step % 2 if step < 2 else number > 5)


def _trained_later(side: Side, make: Make = plain_sgd) -> None:
    """Layers and a part of a layer that are frozen when the model is wrapped. They are trained from
    the second step on, and one of them from a backward within it."""
    module = net(side.dtype, blocks=2)
    for frozen in (module.embedding, module.blocks[0], module.blocks[1].up, module.head):
        frozen.requires_grad_(False)
    model = side.model(module)
    optimizer = side.optimizer(make(model.parameters()))
    for step in range(STEPS):
        if step == 1:
            module.head.requires_grad_(True)
        with side.no_sync(model):
            side.loss(model, step).backward()
        if step == 1:
            module.requires_grad_(True)
        side.loss(model, step, 1).backward()
        side.clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _raises(grad: torch.Tensor) -> None:
    raise KeyError


def _raise_in_backward(module: nn.Module, args: Any) -> None:
    args[0].register_hook(_raises)


def _left_out(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """A step whose backward raises. Torch's optimizer has no gradients to clear then."""
    hook = side.inner(model).blocks[1].register_forward_pre_hook(_raise_in_backward)
    loss = side.loss(model, step, 1)
    hook.remove()
    with suppress(KeyError):
        loss.backward()
    optimizer.zero_grad()


LOOPS |= {
    "layers_frozen_in_turn": functools.partial(
        _trained,
        before=_frozen_in_turn,
        make=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.3),
    ),
    "steps_whose_backward_raises_are_left_out": functools.partial(
        _trained, wraps=False, before=_left_out
    ),
    "initialized_after_wrapping": functools.partial(_trained, before=_initialized),
    "clamped": functools.partial(_trained, make=OPTIMIZERS["AdamW"], after=_clamped),
    "frozen_between_backwards": functools.partial(
        _trained, before=_frozen_later, changed=_trained_again
    ),
    "trained_later": _trained_later,
}
