"""`fully_shard` in the place of torch's: for programs and libraries that call that by its name."""

from __future__ import annotations

import sys
from types import ModuleType

from torch.distributed.fsdp._fully_shard import _fully_shard as implementation

from .feedback import expect_nothing, expect_sharding
from .fsdp2 import fully_shard

ORIGINAL = implementation.fully_shard
REPLACED = "_fsdp_adapter_replaced"
"""Attribute of a module: the names that were replaced in it."""


def use_as_fsdp2() -> list[str]:
    """Replaces torch's `fully_shard` by this package's in every imported module, also in torch's.

    Libraries that call FSDP2 (accelerate, transformers, TRL, Lightning, torchtitan) then use this
    package. Call it before a model is sharded. Models that are sharded already do not change. A
    second call also replaces the function in modules that were imported after the first one. If the
    program trains and nothing calls `fully_shard`, rank 0 prints a warning at exit.

    Examples:
        >>> replaced = use_as_fsdp2()
        >>> "torch.distributed.fsdp.fully_shard" in replaced
        True
        >>> torch.distributed.fsdp.fully_shard is fully_shard
        True

    Returns:
        The replaced names, as "module.name".
    """
    expect_sharding()
    places = []
    for module in _modules():
        places += [(module, name) for name, value in vars(module).items() if value is ORIGINAL]
    for module, name in places:
        setattr(module, name, fully_shard)
        module.__dict__.setdefault(REPLACED, []).append(name)
    return _dotted(places)


def leave_fsdp2() -> list[str]:
    """Restores torch's `fully_shard` wherever `use_as_fsdp2` has replaced it.

    Models that are sharded already do not change.

    Examples:
        >>> replaced = use_as_fsdp2()
        >>> leave_fsdp2() == replaced
        True

    Returns:
        The restored names, as "module.name".
    """
    expect_nothing()
    places = []
    for module in _modules():
        for name in vars(module).pop(REPLACED, []):
            setattr(module, name, ORIGINAL)
            places.append((module, name))
    return _dotted(places)


def _dotted(places: list[tuple[ModuleType, str]]) -> list[str]:
    return sorted(f"{module.__name__}.{name}" for module, name in places)


def _modules() -> list[ModuleType]:
    """All imported modules but this one and the two that define the functions."""
    excluded = (__name__, f"{__package__}.fsdp2", implementation.__name__)
    found = list(sys.modules.values())
    return [one for one in found if isinstance(one, ModuleType) and one.__name__ not in excluded]
