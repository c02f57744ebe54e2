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
"""Patterns of module names, and the placement of such modules with all in them; later ones win.
Names are those of `named_modules()` without a Float16Module's level; patterns are the shell's."""


def placement_of(chosen: Placements, fqn: str) -> str:
    """The placement of the parameter with this name: that of the last pattern that matches a module
    around it."""
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
    """Problems of tied parameters with different placements, and of ignored trainable parameters:
    the first 8."""
    found = []
    # The first name of a parameter, and its placement, by the parameter's id.
    placed: dict[int, tuple[str, str]] = {}
    for fqn, param in module.named_parameters(remove_duplicate=False):
        placement = placement_of(chosen, fqn)
        first, first_placed = placed.setdefault(id(param), (fqn, placement))
        if placement != first_placed:
            found.append(
                f"{ARGUMENT}: {first} and {fqn} are one parameter, but placed as {first_placed!r} "
                f"and {placement!r}. Place both modules alike"
            )
        elif placement == LEAVE and param.requires_grad:
            found.append(
                f"{ARGUMENT}: {fqn} is ignored but trainable, so its gradient would not be "
                "reduced. Freeze it, or leave the pattern out"
            )
    return found[:8]


def _holders(fqn: str) -> list[str]:
    """Names of the modules around a parameter, from the whole model ("") down, without the levels
    of wrappers."""
    levels = fqn.split(".")[:-1]
    while levels[:1] == ["module"]:
        levels = levels[1:]
    return [".".join(levels[:depth]) for depth in range(len(levels) + 1)]
