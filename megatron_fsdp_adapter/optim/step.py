"""The step of an optimizer whose parameters are DTensors, on this rank's local tensors.

torch calls hooks before and after an optimizer's step. The one before it (`_take_step`) puts local
tensors with local gradients in the place of the DTensors. The optimizer's own step updates them, as
it would any tensors. The hook after it (`end_step`) puts the DTensors back.

Some groups of parameters are updated *ahead*, in the hook before the step:

- by a rule of this package, Muon's or Lion's (`_update_by_rule`);
- unit by unit, with main weights and state in host memory (`_update_units`). That calls the
  function of the optimizer's own step once for each unit.

A hook cannot leave out the step that follows it. So a group that was updated ahead has no
parameters then, and the step finds nothing to update in it. The step may still change options of
the group, such as its count of steps. So the hook notes what they are after the update
(`LocalShards.updated`), and `end_step` gives the group these.

One optimizer holds all parameters, as core's own for sharded weights does. So a gradient norm,
clipping and a checkpoint need not know which groups are updated ahead. The section "The optimizer
seam" of docs/contributing/design_steps.md says why not all of them are.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
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
"""Called with an optimizer before its step reads gradients; maybe again in a step inside a step."""

OF_FUSED = {"use_decoupled_grad": True, "master_weights": False, "store_param_remainders": False}
"""Attributes of fused optimizers, and the values that `adopt` gives them."""


def _take_step(optimizer: Any, prepare: Prepare) -> None:
    """Gives the inner optimizer local tensors, and updates groups that are updated ahead of its own
    step, which follows. Does nothing if they were, in a step around this one."""
    shards: LocalShards = optimizer._fsdp_shards
    residency = shards.residency
    # A base class's step inside a subclass's must not update again. `updates_units` or `updated`
    # shows that. `updated` alone is not enough: a step whose `end_step` did not run leaves some.
    if shards.updates_units or (shards.updated and _steps_in_steps(type(optimizer))):
        return
    prepare(optimizer)
    shards.updated = {}
    try:
        residency.finish_updates()
        shards.to_local(optimizer)
        shards.set_local_grads()
        clip = shards.take_clip()
        if residency.on_host:
            updated = _update_units(optimizer, shards, clip)
        else:
            updated = _update_by_rule(optimizer, shards)
    except BaseException:
        residency.give_up()
        raise
    for number in updated:
        optimizer.param_groups[number]["params"] = []
    shards.updated = updated


def _update_by_rule(optimizer: Any, shards: LocalShards) -> dict[int, GroupOptions]:
    """Updates the groups of the rule. Returns their counts of steps, which the inner optimizer's
    own step must not change."""
    groups = optimizer.param_groups
    with torch.no_grad():
        shards.rule.update(shards, groups)
    updated = {}
    for number, group in enumerate(groups):
        if shards.rule.state(group):
            updated[number] = {COUNT: group[COUNT]} if COUNT in group else {}
    return updated


def _update_units(
    optimizer: Any, shards: LocalShards, clip: Clip | None
) -> dict[int, GroupOptions]:
    """Updates all groups that have local tensors, one unit at a time. Returns their options after
    the step."""
    residency = shards.residency
    groups = optimizer.param_groups
    before = [options_of(group) for group in groups]
    updated: dict[int, GroupOptions] = {}

    def update(part: Part) -> None:
        # All units are the same step, which begins with these options.
        for group, options in zip(groups, before, strict=True):
            set_options(group, options)
        _update_unit(optimizer, part, clip)
        for number, group in enumerate(groups):
            if part.pairs[number]:
                updated[number] = options_of(group)

    shards.updates_units = True
    try:
        residency.run(update)
    finally:
        shards.updates_units = False
    for number, group in enumerate(groups):
        # For groups without local tensors, which are left to the step that follows.
        set_options(group, before[number])
        group["params"] = shards.params_for_inner(number)
    if not residency.may_be_late:
        residency.finish_updates()
    return updated


def _update_unit(optimizer: Any, part: Part, clip: Clip | None) -> None:
    """Clips and updates one unit, and casts its main weights."""
    if clip is not None:
        clip.apply([pair for pairs in part.pairs for pair in pairs])
    part.give_to(optimizer)
    # The step inside torch's hooks and `_ending`: these run once, around all units.
    step = inspect.unwrap(
        type(optimizer).step, stop=lambda layer: not getattr(layer, "hooked", False)
    )
    step(optimizer)
    for own in part.groups:
        own.main.write_weights_from_device()


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
    if shards.updates_units:
        return  # a base class's step for one unit: the next ones need their gradients
    shards.clear_local_grads()
    shards.to_sharded(optimizer)


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
    shards.residency.settle()
    shards.to_local(optimizer)
    try:
        yield shards
    finally:
        shards.to_sharded(optimizer)


def _before_state_dict(optimizer: Any) -> None:
    """Makes `optimizer.state` show the present state. A step that is under way ends first."""
    end_step(optimizer)
    with _on_locals(optimizer):
        pass  # `to_local` takes over what a program has changed, and `to_sharded` shows it


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
        rule: how groups are updated that the inner optimizer does not update.
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
        with _on_locals(optimizer):
            residency.plan(optimizer, shards.pairs, skip_empty, shards.state)
            _complete_empty_state(shards, optimizer)
