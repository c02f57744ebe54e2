"""An optimizer that steps on local tensors while its parameters are DTensors: its step, in the hook
in front of the inner optimizer's own, and its state dict.

A parameter group is updated by the inner optimizer (Adam in a run of Megatron), or by a rule of
this package, Muon's or Lion's (`local_shards.UpdateRule`). So one optimizer holds all parameters,
as core's own for sharded weights does; a gradient norm, clipping and a checkpoint know nothing of
it. Where main weights and state are in host memory, a step is one part for each unit
(`residency.py`).

The inner optimizer's own step follows the hook. It finds groups that the hook has updated without
parameters.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .fused_adam import install
from .local_shards import INNER, Clip, LocalShards, UpdateRule, options_of, set_options
from .residency import Part, Residency
from .state import (
    COUNT,
    GroupOptions,
    is_torch_optimizer,
    load_options,
    load_values,
    make_state,
    moments_of,
)

Prepare = Callable[[Any], None]
"""Called with an optimizer before its step reads gradients, and again in a step inside a step."""

OF_FUSED = {"use_decoupled_grad": True, "master_weights": False, "store_param_remainders": False}
"""Attributes of fused optimizers, and the values that `adopt` gives them."""


def _take_step(optimizer: Any, prepare: Prepare) -> None:
    """Updates the groups of `shards.rule` or, with state in host memory, all groups.

    This runs in the pre-hook of the inner optimizer's step. That step follows, and updates the
    other groups: their parameters are local tensors with local gradients then. Groups that were
    updated here have no parameters then, but the step may still count itself in their options.
    `LocalShards.leave` overwrites those with `LocalShards.results`.
    """
    prepare(optimizer)
    shards: LocalShards = optimizer._fsdp_shards
    residency = shards.residency
    groups = optimizer.param_groups
    # A base class's step inside a subclass's must not update again. `updating_parts` or `results`
    # shows that. `results` alone is not enough: a step whose `end_step` did not run leaves some.
    if residency.updating_parts or (shards.results and _steps_in_steps(type(optimizer))):
        return
    # On the device there are no parts. Set before `enter`, which else drops what was loaded ahead.
    residency.updating_parts = residency.on_host
    shards.results = {}
    try:
        residency.finish_updates()
        shards.enter(optimizer)
        shards.set_local_grads()
        clip = shards.take_clip()
        if residency.on_host:
            _update_parts(optimizer, shards, clip)
        else:
            _update_by_rule(shards, groups)
    except BaseException:
        shards.results = {}
        if residency.on_host:
            residency.give_up()
        raise
    finally:
        residency.updating_parts = False
    for number in shards.results:
        # So that the inner optimizer's own step, which follows, does not update this group again.
        # `leave` gives the parameters back.
        groups[number]["params"] = []


def _update_by_rule(shards: LocalShards, groups: Sequence[GroupOptions]) -> None:
    """Updates the groups that are not the inner optimizer's, and notes their counts of steps: the
    inner optimizer's own step must not change them."""
    with torch.no_grad():
        shards.rule.update(shards, groups)
    results = {}
    for number, group in enumerate(groups):
        if shards.rule.state(group):
            results[number] = {COUNT: group[COUNT]} if COUNT in group else {}
    shards.results = results


def _update_parts(optimizer: Any, shards: LocalShards, clip: Clip | None) -> None:
    """Updates all groups, one unit at a time. `_update_part` notes the options after the step."""
    residency = shards.residency
    before = [options_of(group) for group in optimizer.param_groups]
    residency.run(functools.partial(_update_part, optimizer, before, clip))
    for number, group in enumerate(optimizer.param_groups):
        # For groups without a part, which are left to the inner optimizer's own step.
        set_options(group, before[number])
        group["params"] = shards.params_for_inner(number)
    if not residency.may_be_late:
        residency.finish_updates()


def _update_part(
    optimizer: Any, before: Sequence[GroupOptions], clip: Clip | None, part: Part
) -> None:
    """Clips and updates one unit, and casts its main weights.

    before: the options of each group in front of the step. Each unit's update begins with them, as
    all are the same step."""
    shards: LocalShards = optimizer._fsdp_shards
    for group, options in zip(optimizer.param_groups, before, strict=True):
        set_options(group, options)
    if clip is not None:
        clip.apply([pair for pairs in part.pairs for pair in pairs])
    part.give_to(optimizer)
    # The step inside torch's hooks and `_ending`: these run once, around all parts.
    step = inspect.unwrap(
        type(optimizer).step, stop=lambda layer: not getattr(layer, "hooked", False)
    )
    step(optimizer)
    for own in part.groups:
        own.write_own_from_device()
    for number, group in enumerate(optimizer.param_groups):
        if part.pairs[number]:
            shards.results[number] = options_of(group)


def _steps_in_steps(kind: type) -> bool:
    """True if one step may run hooks several times: several classes have a step with hooks, and a
    subclass's may call its base's."""
    steps = (vars(base).get("step") for base in kind.__mro__)
    hooked = {inspect.unwrap(step) for step in steps if step and getattr(step, "hooked", False)}
    return len(hooked) > 1


def end_step(optimizer: Any, *unused: Any) -> None:
    """Clears local gradients, and puts the DTensors back. Runs after each step, also after one that
    raised, and after a base class's step inside a subclass's."""
    shards: LocalShards = optimizer._fsdp_shards
    if shards.residency.updating_parts:
        return  # a base class's step for one part: the next ones need their gradients
    shards.clear_local_grads()
    shards.leave(optimizer)


def _ending(step: Callable[..., Any], end: Callable[..., None]) -> Callable[..., Any]:
    """A step that calls `end` with its arguments if it raises: torch runs no post-hooks then."""

    @functools.wraps(step)
    def stepping(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException:
            end(*args)
            raise

    return stepping


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Runs in front of a step: takes it or, if there is a closure, wraps that so that the step
    follows it. Returns the new arguments, None if they stay. The closure is the user's: it runs on
    the DTensors, and computes the gradients of the step."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _take_step(optimizer, prepare)
        return None

    def closure_then_step() -> Any:
        end_step(optimizer)
        with torch.enable_grad():
            loss = closure()
        _take_step(optimizer, prepare)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_then_step}
    return (args[0], closure_then_step, *args[2:]), kwargs


# State.


@contextmanager
def _on_locals(optimizer: Any) -> Iterator[LocalShards]:
    """A context in which the inner optimizer's parameters and state are the local ones."""
    shards: LocalShards = optimizer._fsdp_shards
    shards.enter(optimizer)
    try:
        yield shards
    finally:
        shards.leave(optimizer)


def _before_state_dict(optimizer: Any) -> None:
    """Makes `optimizer.state` show the present state. A step that is under way ends first."""
    end_step(optimizer)
    with _on_locals(optimizer):
        pass  # `enter` takes over what a program has changed, and `leave` shows it


@torch.no_grad()
def initialize_state(optimizer: Any) -> None:
    """Makes state for every parameter, empty shards included. No step is taken: weights and the
    count of steps stay. For Adam and SGD, of torch, Transformer Engine or apex."""
    with _on_locals(optimizer) as shards:
        make_state(optimizer, shards.rule.state)
        shards.make_missing_state(optimizer)
        _complete_empty_state(shards, optimizer)


def _complete_empty_state(shards: LocalShards, optimizer: Any) -> None:
    """Makes moments of zero size for empty shards that the inner optimizer is not given, so that
    every rank has the same keys."""
    if not shards.skip_empty:
        return
    for _, local in shards.every:
        if local.numel() == 0 and not shards.state[local]:
            names = moments_of(optimizer)
            shards.state[local] = {n: torch.zeros_like(local, dtype=torch.float32) for n in names}


@torch.no_grad()
def _load_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Copies this rank's rows of a state dict's values into the state, in place. Like torch's own:

    - It runs the hooks of a load.
    - It drops state that the state dict does not have.
    - It ends with `__setstate__`, which completes the options of the class.

    Collective if a DTensor is among the values that is not known to be cut like its parameter.

    Raises:
        ValueError: the groups do not have this optimizer's numbers of parameters, a value does not
            have its parameter's shape, or its rows are unknown. No value has been written then.
    """
    _before_state_dict(optimizer)
    given = state_dict.copy()
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed_dict = hook(optimizer, given)
        given = given if changed_dict is None else changed_dict
    current = optimizer.param_groups
    saved = copy.deepcopy(given["param_groups"])
    sizes = [len(group["params"]) for group in current]
    saved_sizes = [len(group["params"]) for group in saved]
    if sizes != saved_sizes:
        raise ValueError(
            f"optimizer state has groups of {saved_sizes} parameters, but "
            f"this optimizer has groups of {sizes}. Load the state of the same model with the "
            "same rules for weight decay and learning rates"
        )
    if moments_of(optimizer) and not isinstance(optimizer, torch.optim.SGD):
        initialize_state(optimizer)
    load_values(optimizer, saved, given["state"])
    for group, saved_group in zip(current, saved, strict=True):
        load_options(group, saved_group)
    with _on_locals(optimizer) as shards:
        shards.make_missing_state(optimizer)
        # `__setstate__` is the inner optimizer's: it must not see the parameters of the rule.
        for group in filter(shards.rule.state, current):
            group["params"] = []
        optimizer.__setstate__({"state": optimizer.state, "param_groups": current})
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


@functools.cache
def _local_class(base: type) -> type:
    """A subclass of the inner optimizer's class whose state dict is that of the shards. Torch's
    hooks on state dicts would not be enough: its load replaces the state instead of writing into
    it, and casts it to the parameters' dtype."""
    members = {
        "step": _ending(base.step, end_step),  # type: ignore[attr-defined]
        "load_state_dict": _load_state_dict,
        # TE's own gives float32 copies, which know no place in a checkpoint and which a load in
        # place would not reach.
        "state_dict": torch.optim.Optimizer.state_dict,
        "__doc__": f"{base.__name__} on the local shards of DTensor parameters.",
    }
    return type(base.__name__, (base,), members)


def adopt(
    optimizer: torch.optim.Optimizer,
    prepare: Prepare = lambda optimizer: None,
    rule: UpdateRule = INNER,
    residency: Residency | None = None,
) -> None:
    """Makes the inner `optimizer` step on local shards. Its parameters must be DTensors.

    TE's FusedAdam keeps no main weights of its own here: they would be a second copy of the shards
    that it is given. It reads `decoupled_grad`, which may have any dtype.

    Steps are seen by torch's hooks. Two other ways were rejected. A subclass's `step`: a learning
    rate scheduler that was made before has put the class's `step` on the optimizer itself. An
    optimizer around the inner one: schedulers, Megatron and users know the inner one by its class
    and by its groups.

    Args:
        prepare: see `Prepare`.
        rule: how groups are updated that are not the inner optimizer's.
        residency: where main weights and state are; on the device if it is not given.

    Raises:
        ValueError: the optimizer is a fused one that is made for CUDA graphs.
    """
    if getattr(optimizer, "capturable", False):
        raise ValueError(
            f"capturable=True of {type(optimizer).__name__}: a graph of the optimizer's step is "
            "not supported. Make it with capturable=False"
        )
    skip_empty = not is_torch_optimizer(
        optimizer
    )  # TE's kernel skips a group that has an empty one
    decoupled = hasattr(optimizer, "use_decoupled_grad")
    for option, value in OF_FUSED.items():
        if hasattr(optimizer, option):
            setattr(optimizer, option, value)
    residency = residency or Residency((), optimizer)
    fused_step = install(optimizer)
    shards = LocalShards(optimizer, skip_empty, decoupled, rule, residency, fused_step)
    optimizer._fsdp_shards = shards  # type: ignore[attr-defined]
    optimizer.__class__ = _local_class(type(optimizer))  # type: ignore[arg-type]
    if "step" in vars(optimizer):  # a scheduler's
        ref = weakref.ref(optimizer)  # or it would keep itself alive
        optimizer.step = _ending(optimizer.step, lambda *_: end_step(ref()))  # type: ignore[method-assign]
    optimizer.register_step_pre_hook(functools.partial(_before_step, prepare=prepare))
    optimizer.register_step_post_hook(end_step)
    optimizer.register_state_dict_pre_hook(_before_state_dict)
    if residency.on_host:
        shards.enter(optimizer)
        residency.plan(optimizer, shards.pairs, skip_empty, shards.state)
        _complete_empty_state(shards, optimizer)
        shards.leave(optimizer)
