"""Gives parameters on the meta device memory and values, and moves those on another device to that
of the shards, one unit at a time.

A model that is built on the meta device takes no memory. Its modules are initialized here in the
order of the module tree, just before the unit that they belong to is sharded, so about one unit is
unsharded at any time (`materializer`). Their constructors would have drawn random numbers in the
same order. If each module's `reset_parameters` draws the same numbers as its constructor, the
weights are bit for bit those of a start without the meta device.

Parameter objects stay and get new content. So ties stay, and attributes that other code has set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ..core.engine.partition import UnitPlan

Initializer = Callable[[nn.Module, Mapping[str, nn.Parameter]], None]
"""Called with a module, and with its parameters as they were. Gives values to all parameters and
buffers that the module holds itself, not to those below it. The new parameters do not have the
marks (attributes) of the former ones yet."""

InitializerOf = Callable[[nn.Module, nn.Module | None], Initializer | None]
"""The initializer of a module, from the module and the one that holds it; None if there is none."""

META_OPTION = "init_model_with_meta_device"


def own_initializer(module: nn.Module, parent: nn.Module | None) -> Initializer | None:
    """An initializer that calls the module's `reset_parameters`, or `_reset_parameters`, as torch's
    attention names it; None if the module has neither."""
    names = ("reset_parameters", "_reset_parameters")
    name = next((name for name in names if callable(getattr(module, name, None))), None)
    if name is None:
        return None
    return lambda child, _: getattr(child, name)()


def values_come_later(module: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    """An initializer that writes nothing. NaN stays until a load, or the user, gives values after
    the model is sharded."""


def target_device(module: nn.Module, wanted: torch.device | str | None) -> torch.device:
    """The device for the parameters of `module`. The first of these that there is: `wanted`; the
    device of the first parameter that is not on the meta device; this process's GPU; the CPU."""
    if wanted is not None:
        return torch.device(wanted)
    for param in module.parameters():
        if not param.is_meta:
            return param.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_of_type(module: nn.Module, kind: str) -> torch.device:
    """The device of `module`'s parameters if it is of this type ("cuda", say), else this process's
    device of the type."""
    own = target_device(module, None)
    if own.type == kind:
        return own
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Moves those of `tensors` that are on a device of another type, in place. Those on the meta
    device stay."""
    for tensor in tensors:
        if tensor.device.type not in (device.type, "meta"):
            tensor.data = tensor.data.to(device)


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors that `module` holds itself on the meta device."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                yield name, tensor


def _parent(module: nn.Module, name: str) -> nn.Module | None:
    # The module that holds the submodule `name`; None for `module` itself.
    if not name:
        return None
    parent, _, _ = name.rpartition(".")
    return module.get_submodule(parent)


def meta_problems(module: nn.Module, allowed: bool, initializer_of: InitializerOf) -> list[str]:
    """At most one line. If `allowed`, it names all modules that cannot initialize what they hold on
    the meta device; otherwise the first parameter that is on it."""
    holders = [(name, child) for name, child in module.named_modules() if any(_held(child))]
    if holders and not allowed:
        name, child = holders[0]
        own, _ = next(_held(child))
        return [
            f"{META_OPTION}=False: the module's parameter {name}.{own} is on the meta device. "
            f"Set {META_OPTION}=True, or build the model on its device"
        ]
    helpless = []
    for name, child in holders:
        if initializer_of(child, _parent(module, name)) is None:
            tensors = ", ".join(tensor for tensor, _ in _held(child))
            shown = name or "the module itself"
            helpless.append(f"{shown} ({type(child).__name__}: {tensors})")
    if not helpless:
        return []
    listed = "; ".join(helpless)
    return [
        f"{META_OPTION}=True: {len(helpless)} modules on the meta device have no "
        "reset_parameters (or "
        "one that core does not use) to initialize their parameters or buffers: "
        f"{listed}. Add one, build these modules on a device, or set it to False"
    ]


def _unfilled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like `tensor`, with memory. It has NaN, or zeros in a dtype without NaN: so elements
    that are never written show."""
    empty = torch.empty_like(tensor, device=device)
    if empty.is_floating_point():
        return empty.fill_(float("nan"))
    return empty.zero_()


def initialize(name: str, module: nn.Module, device: torch.device, run: Initializer) -> None:
    """Gives everything that `module` holds itself on the meta device memory on `device`, and
    values by `run`. Parameters that are not on the meta device, such as tied ones, keep their
    values.

    `run` sees fresh parameters without marks, as in a constructor: some initializers of TE and core
    refuse to mark a parameter twice, and some put new objects in place. name: of `module`, for
    errors.

    Raises:
        ValueError: `run` left a part of a tensor unwritten (unless it is `values_come_later`), or
            changed its shape or dtype.
    """
    originals = {n: param for n, param in module._parameters.items() if param is not None}
    for own, param in originals.items():
        fresh = nn.Parameter(_unfilled(param, device), param.requires_grad)
        module._parameters[own] = fresh
    for own, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[own] = _unfilled(buffer, device)
    must_fill = run is not values_come_later
    with torch.no_grad():
        run(module, originals)
    for own, original in originals.items():
        made = module._parameters[own]
        module._parameters[own] = original
        if original.is_meta:
            _check(f"{name}.{own}", original, made, must_fill)
            _take_over(original, made)  # type: ignore[arg-type]
    for own, filled in module._buffers.items():
        if filled is not None:
            _check(f"{name}.{own}", filled, filled, must_fill)


def _check(name: str, wanted: torch.Tensor, made: torch.Tensor | None, must_fill: bool) -> None:
    # must_fill: the initializer must have written all of `made`.
    expected = (tuple(wanted.shape), wanted.dtype)
    found = None if made is None else (tuple(made.shape), made.dtype)
    if made is None or found != expected:
        raise ValueError(
            f"{META_OPTION}=True: reset_parameters made {found} of {name}, expected "
            f"{expected}. Make it keep shape and dtype"
        )
    # The sum needs no memory for a comparison of each element, and one NaN makes it NaN.
    if must_fill and made.is_floating_point() and made.detach().sum().isnan():
        raise ValueError(
            f"{META_OPTION}=True: reset_parameters of the module of {name} left a part of it "
            "unwritten. Make it write all of the module's own tensors"
        )


def _take_over(original: nn.Parameter, made: nn.Parameter) -> None:
    """Gives `original` the content of `made`, and the marks of both. The marks of `made` win:
    Megatron writes defaults first, and TE marks how a weight is split only when it initializes
    it."""
    marks = {**original.__dict__, **made.__dict__}
    made = nn.Parameter(made.detach(), original.requires_grad)
    torch.utils.swap_tensors(original, made)
    original.__dict__.clear()
    original.__dict__.update(marks)


def materializer(
    module: nn.Module,
    plans: Sequence[UnitPlan],
    device: torch.device,
    initializer_of: InitializerOf,
) -> Callable[[UnitPlan], None]:
    """A function that gives the parameters of a unit their values on `device`. It must be called
    with each of `plans` in order, before the plan is sharded; the root unit's is the last. It
    initializes what is on the meta device, and moves what is on a device of another type.

    Random numbers are drawn in module order. So a call initializes all modules up to the unit's
    last one, also those of other units. What the root unit has among them stays whole until the
    root unit is sharded.
    """
    waiting: deque[tuple[str, nn.Module, nn.Module | None]] = deque()
    # By a module's id, the number of modules that are initialized once it is.
    number_of: dict[int, int] = {}
    for name, child in module.named_modules():
        if any(_held(child)):
            waiting.append((name, child, _parent(module, name)))
            number_of[id(child)] = len(waiting)
    total = len(waiting)
    # By plan, the number of modules that are initialized before it is sharded.
    goals: deque[int] = deque()
    for plan in plans:
        last = 0
        for managed in plan.groups.values():
            for entry in managed:
                owner, _ = entry.slots[0]
                last = max(last, number_of.get(id(owner), 0))
        goals.append(last)
    goals[-1] = total  # what is in no plan, such as buffers, comes with the last

    def prepare(plan: UnitPlan) -> None:
        goal = goals.popleft()
        while total - len(waiting) < goal:
            name, child, parent = waiting.popleft()
            run = initializer_of(child, parent)
            assert run is not None, name  # `meta_problems` has one for it
            initialize(name, child, device, run)
        move((one.param for group in plan.groups.values() for one in group), device)

    return prepare
