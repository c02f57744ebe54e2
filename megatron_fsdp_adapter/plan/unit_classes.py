"""The modules that are units: those of named classes, or the repeated layers where none is
named."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

UNIT_CLASSES_OPTION = "fsdp_unit_modules"
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
PART_OF_LARGEST = 10
"""A list of layers counts if it has at least a tenth of the elements of the largest list: the
towers of an encoder and a decoder do, a few small heads do not."""


def unit_problems(module: nn.Module, named: Any) -> list[str]:
    """One line for each of `named` (classes, names of classes, import paths) that matches no module
    in `module`, or is none of these. One line if `named` itself is a class, and no list."""
    if isinstance(named, str | type):
        return [f"{UNIT_CLASSES_OPTION}={named!r}: a class, not a list. Put it into a list"]
    found = []
    names = [_name(one) for one in named]
    for one in named:
        classes = classes_of(module, [one])
        if not any(isinstance(child, classes) for child in module.modules()):
            found.append(f"{UNIT_CLASSES_OPTION}={names}: {_why_not(module, one)}")
    return found


def classes_of(module: nn.Module, named: Sequence[type[nn.Module] | str]) -> tuple[type, ...]:
    """The classes that `named` names, for `isinstance`. A string is the name of a class of a module
    in `module`, or an import path. One that is neither adds nothing."""
    found: list[type] = []
    for one in named:
        if isinstance(one, str):
            found += _classes_called(module, one)
        elif isinstance(one, type):
            found.append(one)
    return tuple(found)


def _classes_called(module: nn.Module, name: str) -> list[type]:
    """The classes of modules in `module` with this name or path, else the class at that path."""
    found = [one for one in _classes_below(module) if name in (one.__name__, _path(one))]
    return found or _imported(name)


def _classes_below(module: nn.Module) -> list[type]:
    """The classes of `module` and the modules in it, and those that they inherit from."""
    found: dict[type, None] = {}  # a set in order
    for child in module.modules():
        found.update(dict.fromkeys(type(child).__mro__))
    return [kind for kind in found if issubclass(kind, nn.Module) and kind is not nn.Module]


def _imported(path: str) -> list[type]:
    """The class at a dotted import path, as a list; empty if there is none. The path need not be
    where the class is defined."""
    place, _, name = path.rpartition(".")
    if not place:
        return []
    try:
        found = getattr(importlib.import_module(place), name, None)
    except (ImportError, ValueError):
        return []
    return [found] if isinstance(found, type) else []


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _name(one: Any) -> str:
    return one.__name__ if isinstance(one, type) else str(one)


def _why_not(module: nn.Module, one: Any) -> str:
    """The reason why `one` names no unit of `module`, and what to do."""
    if not isinstance(one, str | type):
        return f"{one!r} is neither a class nor the name of a class"
    name = _name(one)
    known = list(dict.fromkeys(kind.__name__ for kind in _classes_below(module)))
    _, _, class_name = name.rpartition(".")
    near = ", ".join(difflib.get_close_matches(class_name, known))
    hint = f" (near it: {near})" if near else ""
    return (
        f"no module of {type(module).__name__} is a {name}{hint}. Name a class that the model "
        "contains, or leave the argument out for its repeated layers"
    )


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of `module` that are units if no class is named; empty if there are none. They are
    the modules that a Hugging Face model lists as not to be split. Without such a list they are the
    entries of the lists of layers."""
    found = _not_to_be_split(module)
    if found:
        return found
    lists = _lists_of_layers(module)
    sizes = [sum(param.numel() for param in one.parameters()) for one in lists]
    for one, size in zip(lists, sizes, strict=True):
        if size * PART_OF_LARGEST >= max(sizes):
            found += filter(_has_parameters, one.children())
    return found


def _not_to_be_split(module: nn.Module) -> list[nn.Module]:
    """Modules below `module` of the classes that Hugging Face models name in an attribute."""
    named: set[str] = set()
    for child in module.modules():
        named.update(getattr(child, "_no_split_modules", None) or ())
    found = []
    for child in module.modules():
        classes = {base.__name__ for base in type(child).__mro__}
        if child is not module and named & classes:
            found.append(child)
    return found


def _lists_of_layers(module: nn.Module) -> list[nn.Module]:
    """The outermost lists of layers: those that are in no other one."""
    found: list[nn.Module] = []
    for child in module.modules():  # outermost ones come first
        is_inside_one = any(child is below for one in found for below in one.modules())
        if not is_inside_one and _repeats(child):
            found.append(child)
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeats(module: nn.Module) -> bool:
    """True if `module` is a list of layers: two entries with parameters have the same class. In a
    Sequential only entries that contain modules count: one of single operations is one layer."""
    if not isinstance(module, LISTS):
        return False
    entries = list(filter(_has_parameters, module.children()))
    if isinstance(module, nn.Sequential):
        entries = [entry for entry in entries if next(entry.children(), None) is not None]
    return len(set(map(type, entries))) < len(entries)
