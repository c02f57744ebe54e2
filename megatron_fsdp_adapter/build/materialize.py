"""Parameters on the meta device get memory and values, and those on another device move to that of
the shards, one unit at a time.

A model that is built on the meta device takes no memory. Its modules are initialized here in the
order of the module tree, just before the unit that they belong to is sharded, so that at most one
unit is unsharded at any time. That is also the order in which their constructors would have drawn
random numbers: where a module draws in `reset_parameters` what it draws in its
constructor, the weights are those of a start without the meta device, bit for bit.

Parameter objects stay, and get new content, so that ties, and attributes that other code has set,
hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ..core.engine.partition import UnitPlan

Initializer = Callable[[nn.Module, Mapping[str, nn.Parameter]], None]
"""Gives values to all parameters and buffers that a module holds itself, not those below it. It is
also given the parameters as they were, whose marks the new ones do not have yet."""

InitializerOf = Callable[[nn.Module, nn.Module | None], Initializer | None]
"""The initializer of a module, from the module and the one that holds it; None if there is none."""

META_OPTION = "init_model_with_meta_device"


def own_initializer(module: nn.Module, parent: nn.Module | None) -> Initializer | None:
    """`reset_parameters`, torch's name for it, or the `_reset_parameters` of its attention, where
    the module has one."""
    names = ("reset_parameters", "_reset_parameters")
    name = next((name for name in names if callable(getattr(module, name, None))), None)
    if name is None:
        return None
    return lambda child, _: getattr(child, name)()


def values_come_later(module: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    """Leaves NaN in what a load, or the user, gives values after the model is sharded."""


def target_device(module: nn.Module, wanted: torch.device | str | None) -> torch.device:
    """The device for the parameters of `module`: `wanted`, or that of those that are not on the
    meta device, or else this process's GPU, or the CPU where there is none."""
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
    """Moves those of `tensors` that are on a device of another type, in place; not from meta."""
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
    if not name:
        return None
    parent, _, _ = name.rpartition(".")
    return module.get_submodule(parent)


def meta_problems(module: nn.Module, allowed: bool, initializer_of: InitializerOf) -> list[str]:
    """One line if parameters are on the meta device though that is not asked for, or naming all
    modules that cannot initialize what they hold there."""
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
    """Like `tensor`, with memory, and NaN where the dtype has one: what is not written shows."""
    empty = torch.empty_like(tensor, device=device)
    if empty.is_floating_point():
        return empty.fill_(float("nan"))
    return empty.zero_()


def initialize(name: str, module: nn.Module, device: torch.device, run: Initializer) -> None:
    """Gives everything that `module` holds itself on the meta device memory on `device`, and
    values by `run`. Parameters that are not on the meta device, tied ones for instance, keep
    theirs.

    `run` sees fresh parameters without marks, as a constructor would: some of TE's and core's
    initializers refuse to mark a parameter twice, and some put new objects in place.

    Raises:
        ValueError: `run` left something as it was, or changed its shape or dtype.
    """
    originals = {n: param for n, param in module._parameters.items() if param is not None}
    for own, param in originals.items():
        fresh = nn.Parameter(_unfilled(param, device), param.requires_grad)
        module._parameters[own] = fresh
    for own, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[own] = _unfilled(buffer, device)
    checks = run is not values_come_later
    with torch.no_grad():
        run(module, originals)
    for own, original in originals.items():
        made = module._parameters[own]
        module._parameters[own] = original
        if original.is_meta:
            _check(f"{name}.{own}", original, made, checks)
            _take_over(original, made)  # type: ignore[arg-type]
    for own, filled in module._buffers.items():
        if filled is not None:
            _check(f"{name}.{own}", filled, filled, checks)


def _check(name: str, wanted: torch.Tensor, made: torch.Tensor | None, is_filled: bool) -> None:
    expected = (tuple(wanted.shape), wanted.dtype)
    found = None if made is None else (tuple(made.shape), made.dtype)
    if made is None or found != expected:
        raise ValueError(
            f"{META_OPTION}=True: reset_parameters made {found} of {name}, expected "
            f"{expected}. Make it keep shape and dtype"
        )
    # The sum needs no memory for a comparison of each element, and one NaN makes it NaN.
    if is_filled and made.is_floating_point() and made.detach().sum().isnan():
        raise ValueError(
            f"{META_OPTION}=True: reset_parameters of the module of {name} left a part of it "
            "unwritten. Make it write all of the module's own tensors"
        )


def _take_over(original: nn.Parameter, made: nn.Parameter) -> None:
    """Gives `original` the content of `made` and the marks of both. Those of `made` win: TE records
    how a weight is split only when it initializes it, and Megatron writes its defaults before."""
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
    """Returns a function that gives parameters below `module` their values on `device`, unit by
    unit: called with each plan before it is sharded, the root unit's last. It initializes what is
    on the meta device, and moves what is on a device of another type.

    Modules that come before a unit's last one are initialized with it, whatever unit they belong
    to, so that random numbers are drawn in module order: what the root unit holds of them waits,
    whole, until that is sharded.
    """
    waiting: deque[tuple[str, nn.Module, nn.Module | None]] = deque()
    # By a module's id, how many are initialized when it is.
    behind: dict[int, int] = {}
    for name, child in module.named_modules():
        if any(_held(child)):
            waiting.append((name, child, _parent(module, name)))
            behind[id(child)] = len(waiting)
    total = len(waiting)
    until: deque[int] = deque()
    for plan in plans:
        last = 0
        for managed in plan.groups.values():
            for entry in managed:
                owner, _ = entry.slots[0]
                last = max(last, behind.get(id(owner), 0))
        until.append(last)
    until[-1] = total

    def prepare(plan: UnitPlan) -> None:
        upto = until.popleft()
        while total - len(waiting) < upto:
            name, child, parent = waiting.popleft()
            run = initializer_of(child, parent)
            assert run is not None, name  # `meta_problems` has one for it
            initialize(name, child, device, run)
        move((one.param for group in plan.groups.values() for one in group), device)

    return prepare
