"""The modules that are units: those of named classes, or the repeated layers where none is
named."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

OPTION = "fsdp_unit_modules"
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
PART_OF_LARGEST = 10
"""A list of layers counts if it has this part, a reciprocal, of the elements of the largest one:
towers of an encoder and a decoder do, a few small heads do not."""


def unit_problems(module: nn.Module, named: Any) -> list[str]:
    """One line for each of `named` (classes, names of classes, import paths) that is none of these,
    or matches no module below `module`."""
    if isinstance(named, str | type):
        return [f"{OPTION}={named!r}: a class, not a list. Put it into a list"]
    return [
        f"{OPTION}={[_name(other) for other in named]}: {_why_not(module, one)}"
        for one in named
        if not any(isinstance(child, classes_of(module, [one])) for child in module.modules())
    ]


def classes_of(module: nn.Module, named: Sequence[type[nn.Module] | str]) -> tuple[type, ...]:
    """Classes for `isinstance`, of `named`. A string is the name of a class among those of the
    modules below `module`, or an import path; one that is neither adds nothing."""
    found: list[type] = []
    for one in named:
        if isinstance(one, str):
            found += _classes_called(module, one)
        elif isinstance(one, type):
            found.append(one)
    return tuple(found)


def _classes_called(module: nn.Module, name: str) -> list[type]:
    found = [one for one in _classes_below(module) if name in (one.__name__, _path(one))]
    return found or _imported(name)


def _classes_below(module: nn.Module) -> list[type]:
    """The classes of the modules below `module`, and those that they inherit from."""
    kinds = {type(child): None for child in module.modules()}
    lines = {base: None for kind in kinds for base in kind.__mro__ if issubclass(base, nn.Module)}
    return [kind for kind in lines if kind is not nn.Module]


def _imported(path: str) -> list[type]:
    """The class at a dotted path, which need not be where it is defined."""
    place, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(place), name, None) if place else None
    except (ImportError, ValueError):
        return []
    return [found] if isinstance(found, type) else []


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _name(one: Any) -> str:
    return one.__name__ if isinstance(one, type) else str(one)


def _why_not(module: nn.Module, one: Any) -> str:
    if not isinstance(one, str | type):
        return f"{one!r} is neither a class nor the name of a class"
    name = _name(one)
    known = list(dict.fromkeys(kind.__name__ for kind in _classes_below(module)))
    near = difflib.get_close_matches(name.rpartition(".")[2], known)
    hint = f" (near it: {', '.join(near)})" if near else ""
    return (
        f"no module of {type(module).__name__} is a {name}{hint}. Name a class that the model "
        "contains, or leave the argument out for its repeated layers"
    )


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of `module`, where no class is named: modules of the classes that Hugging Face
    models name as not to be split, else the entries of its lists of layers. Empty without any."""
    children = [child for child in module.modules() if child is not module]
    named = {
        name
        for child in module.modules()
        for name in getattr(child, "_no_split_modules", None) or ()
    }
    found = [
        child for child in children if named & {base.__name__ for base in type(child).__mro__}
    ]
    if found:
        return found
    lists: list[nn.Module] = []
    for child in module.modules():  # outermost ones come first
        inside = any(child is below for one in lists for below in one.modules())
        if not inside and _repeats(child):
            lists.append(child)
    sizes = [sum(param.numel() for param in one.parameters()) for one in lists]
    counted = (
        one for one, size in zip(lists, sizes, strict=True) if size * PART_OF_LARGEST >= max(sizes)
    )
    return [entry for one in counted for entry in one.children() if _has_parameters(entry)]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeats(module: nn.Module) -> bool:
    """True if `module` is a list of layers: two of one class have parameters. A Sequential of
    single operations is one layer."""
    if not isinstance(module, LISTS):
        return False
    may_be_one = not isinstance(module, nn.Sequential)
    kinds = [
        type(entry) for entry in module.children()
        if _has_parameters(entry) and (may_be_one or next(entry.children(), None) is not None)
    ]
    return len(set(kinds)) < len(kinds)
