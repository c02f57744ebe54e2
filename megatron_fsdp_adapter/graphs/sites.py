"""Modules that are captured: where their weights and gradients are."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.unit import Unit
from ..core.runtime.device import GATHER


@dataclasses.dataclass(eq=False)
class Site:
    """A module that is captured.

    Attributes:
        module: a weak reference, as the module's `forward` holds this object.
        unit: that has its weights.
        groups: of the unit, those that have its weights.
        parts: the groups whose buckets its weight gradients go to, with the indices of its
            parameters in them.
    """

    name: str
    module: Callable[[], nn.Module | None]
    unit: Unit
    groups: Sequence[ParamGroup]
    parts: Sequence[tuple[ParamGroup, Sequence[int]]]

    @property
    def may_be_fixed(self) -> bool:
        """True if its weights and gradients may have fixed addresses: those of slots, or their own
        if they stay unsharded over a step."""
        for group in self.groups:
            weights = group.weights.is_kept or self.unit.stays
            if not (weights or all(full.in_slot for full in group.weights.unsharded)):
                return False
            if group.key.requires_grad:
                grads = group.grads
                if not (grads.is_kept or grads.bucket.in_slot):
                    return False
        return True

    @property
    def keeps_grads(self) -> bool:
        """True if some of its gradients are kept from one microbatch to the next."""
        return any(group.grads.is_kept for group, _ in self.parts)

    def function(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        module = self.module()
        return type(module).forward(module, *args, **kwargs)  # type: ignore[union-attr]

    def caches(self) -> Iterator[torch.Tensor]:
        """Tensors that it has beside parameters."""
        module = self.module()
        if module is None:
            return
        for child in module.modules():
            for value in (*vars(child).values(), *child._buffers.values()):
                if isinstance(value, torch.Tensor):
                    yield value

    def check_open(self) -> None:
        """Raises RuntimeError if its unit's backward does not run."""
        if not all(group.grads.direct.is_open for group, _ in self.parts):
            raise RuntimeError(
                f"{self.name}: the backward of its graph runs outside of its unit's backward. Call "
                "the model through its wrapper, and run backward on what it returned"
            )

    def take_grads(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Takes gradients off its parameters; returns the parameters that had one, with it."""
        found = []
        for group, indices in self.parts:
            for index in indices:
                param = group.params[index]
                if param.grad is not None:
                    found.append((param, param.grad))
                    param.grad = None
        return found

    def move_grads(self) -> None:
        """Moves `.grad` into the buckets, as the end of a unit's backward does. In a capture."""
        for group, indices in self.parts:
            given = [(index, group.params[index].grad) for index in indices]
            direct = group.grads.direct
            group.grads.put(given, direct.written)
            direct.note_written(index for index, grad in given if grad is not None)
            direct.settle()
        self.take_grads()

    def written(self) -> list[set[int]]:
        """The parameters, by group, whose part of the bucket holds a gradient."""
        return [group.grads.direct.written.intersection(indices) for group, indices in self.parts]


def site_of(engine: FsdpEngine, name: str, module: nn.Module) -> Site:
    """The site of a module. Raises ValueError unless one unit has all its weights, and, if nothing
    chooses other units later, unless these and their gradients have fixed addresses."""
    inside = {id(child) for child in module.modules()}
    units = {}
    groups = []
    parts = []
    for unit in engine.units:
        for group in unit.groups:
            indices = _held_by(inside, group)
            if indices:
                units[unit.ordinal] = unit
                groups.append(group)
                if group.key.requires_grad:
                    parts.append((group, indices))
    if len(units) != 1:
        names = ", ".join(unit.name for unit in units.values())
        raise ValueError(
            f"{name}: a CUDA graph needs all weights gathered at once, and its weights are in "
            f"{len(units)} units ({names or 'none'})"
        )
    (unit,) = units.values()
    site = Site(name, weakref.ref(module), unit, groups, parts)
    finds_units = engine.budget is not None and engine.budget.may_keep
    if not finds_units and not site.may_be_fixed:
        raise ValueError(
            f"unit {unit.name}: CUDA graphs of layers need weights and gradients at fixed "
            "addresses. Use fsdp_double_buffer, or 'optim' or 'no_shard'"
        )
    return site


def _held_by(modules: Collection[int], group: ParamGroup) -> list[int]:
    """Indices of the group's parameters that any of these modules, given by their ids, holds."""
    found = []
    for index, entry in enumerate(group.managed):
        if any(id(owner) in modules for owner, _ in entry.slots):
            found.append(index)
    return found


def fix_memory(
    engine: FsdpEngine, sites: Collection[Site], chosen: Collection[Site], adds: bool
) -> None:
    """Fixes the addresses of weights and gradients of the `chosen` ones of `sites`, and of no
    others. Must be called while no gradients are there. adds: as of `GradBuffers.write_by_graphs`.
    """
    units = {site.unit.ordinal: site.unit for site in sites}
    engine.gather.follow_compute()
    for unit in units.values():
        groups = [group for site in chosen if site.unit is unit for group in site.groups]
        engine.runtime.submit(GATHER, partial(unit.keep_weight_memory, groups))
        unit.write_by_graphs(groups, adds)
    engine.gather.quiesce()
