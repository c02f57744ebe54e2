"""Placement of modules: sharded, or ignored.

A module that is left alone keeps its parameters as they are: no buffers, no communication, no
optimizer; it must be frozen.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn

SHARD = "shard"
LEAVE = "leave"
PLACEMENTS = (SHARD, LEAVE)
ARGUMENT = "module_placements"

Placements = Mapping[str, str]
"""Patterns of module names (those of `named_modules()`, shell wildcards, a Float16Module's level
left out) and what to do with what is below such a module; later ones win."""


def placement_of(chosen: Placements, fqn: str) -> str:
    """The placement of the parameter of this name: that of the modules that hold it."""
    found = SHARD
    for pattern, placement in chosen.items():
        if any(fnmatch.fnmatchcase(name, pattern) for name in _holders(fqn)):
            found = placement
    return found


def placement_problems(chosen: Placements, module: nn.Module) -> list[str]:
    """Problems of the placements for `module`."""
    names = {name for fqn, _ in module.named_parameters() for name in _holders(fqn)}
    found = []
    for pattern, placement in chosen.items():
        given = f"{ARGUMENT}={{{pattern!r}: {placement!r}}}"
        if placement not in PLACEMENTS:
            found.append(f"{given}: unknown. Use one of {list(PLACEMENTS)}")
        if not fnmatch.filter(names, pattern):
            found.append(
                f"{given}: no module with parameters has such a name. Use names of "
                f"named_modules(), such as {sorted(names)[:3]}"
            )
    return found + _conflicts(chosen, module)


def _conflicts(chosen: Placements, module: nn.Module) -> list[str]:
    found = []
    placed: dict[int, tuple[str, str]] = {}  # the first name of a parameter, by its id
    for fqn, param in module.named_parameters(remove_duplicate=False):
        placement = placement_of(chosen, fqn)
        first, before = placed.setdefault(id(param), (fqn, placement))
        if placement != before:
            found.append(
                f"{ARGUMENT}: {first} and {fqn} are one parameter, but placed as {before!r} "
                f"and {placement!r}. Place both modules alike"
            )
        elif placement == LEAVE and param.requires_grad:
            found.append(
                f"{ARGUMENT}: {fqn} is ignored but trainable, so its gradient would not be "
                "reduced. Freeze it, or leave the pattern out"
            )
    return found[:8]


def _holders(fqn: str) -> list[str]:
    """The modules that hold a parameter, from the whole model down, without wrappers' levels."""
    levels = fqn.split(".")[:-1]
    while levels[:1] == ["module"]:
        levels = levels[1:]
    return [".".join(levels[:depth]) for depth in range(len(levels) + 1)]
