"""The two identities of a parameter, and which of them the module tree shows.

Inside forward and backward a module's slot holds the unsharded parameter, a plain tensor over the
gathered weights. Outside it holds the sharded parameter, a DTensor over this rank's rows of the
main weights. Both objects are made once: optimizer groups, name caches and state dicts go by
object identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron_fsdp_adapter.dtensor import UnevenDTensor

from .group import ParamGroup
from .partition import ManagedParam


def as_dtensor(local: torch.Tensor, group: ParamGroup, index: int) -> UnevenDTensor:
    """A DTensor of item `index`'s global shape over this rank's rows `local`.

    The mesh may end in an axis over which the model itself splits tensors: the global shape is
    then that of the whole tensor, of which the group's layout has one part. Rows are split
    unevenly and without communication: shape and stride are stated, so torch neither checks nor
    infers them. `chunks` later gives the rows. `local` is aliased.
    """
    shape = group.layout.specs[index].layout_shape
    placements: list[Placement] = []
    if group.domain.outer is not None:
        placements.append(Shard(0) if group.splits_outer else Replicate())
    placements.append(Shard(0) if group.shards_main else Replicate())
    if group.domain.mesh.ndim > len(placements):
        split = group.managed[index].split
        placements.append(Replicate() if split is None else Shard(split))
        if split is not None:
            parts = group.domain.mesh.size(-1)
            shape = (*shape[:split], shape[split] * parts, *shape[split + 1 :])
    stride = torch.empty(shape, device="meta").stride()
    return UnevenDTensor.over(local, group.domain.mesh, placements, shape, stride)


@dataclass(frozen=True, eq=False)
class ParamPair:
    """Both identities of one parameter, and its gradient as the optimizer sees it.

    `grad` aliases this rank's rows of the main gradients; None for a frozen parameter.
    """

    managed: ManagedParam
    group: ParamGroup
    index: int
    sharded: nn.Parameter
    grad: DTensor | None

    @property
    def unsharded(self) -> nn.Parameter:
        return self.managed.param

    def attach_grad(self) -> None:
        """One DTensor under both names that optimizers look at. A gradient that is there already,
        of a loss that reads the sharded parameter, is part of it."""
        given: Any = self.sharded.grad
        if given is not None and given is not self.grad:
            self.grad._local_tensor.add_(self.local_of(given))  # type: ignore[union-attr]
        self.sharded.grad = self.sharded.decoupled_grad = self.grad  # type: ignore[assignment,attr-defined]

    def local_of(self, given: Any) -> torch.Tensor:
        """This rank's rows of a gradient that the engine did not make."""
        if getattr(given, "placements", None) != self.grad.placements:  # type: ignore[union-attr]
            raise RuntimeError(
                f"grad of parameter {self.managed.fqns[0]} was set to a {type(given).__name__} "
                f"that is not sharded like the parameter ({self.grad.placements}). Make it from "  # type: ignore[union-attr]
                "the .grad that is there, by operations that keep its placement"
            )
        return given._local_tensor

    def drop_grad(self) -> None:
        self.sharded.grad = self.sharded.decoupled_grad = None  # type: ignore[attr-defined]


def make_pairs(groups: Sequence[ParamGroup]) -> list[ParamPair]:
    """Sharded parameters and gradients for every parameter of `groups`. The gradient buffers
    may be released."""
    pairs = []
    for group in groups:
        trainable, held = group.key.requires_grad, group.held
        for index, managed in enumerate(group.managed):
            made = nn.Parameter(
                as_dtensor(group.device_main.items(held)[index], group, index),
                requires_grad=trainable,
            )
            sharded = managed.shown_as(made)
            if group.main_on_host:
                # Gradients are on the device, and torch takes none of another device than its
                # parameter: the DTensor still reports it.
                sharded._local_tensor = group.main.items(held)[index]  # type: ignore[attr-defined]
            grad = as_dtensor(group.grad.items(held)[index], group, index) if trainable else None
            if grad is not None and grad.dtype != sharded.dtype:
                sharded.grad_dtype = grad.dtype  # type: ignore[attr-defined]
            pairs.append(ParamPair(managed, group, index, sharded, grad))
    return pairs


class ParameterSwitch:
    """Puts unsharded or sharded parameters into all slots of the module tree, tied ones too."""

    def __init__(self, pairs: Sequence[ParamPair]) -> None:
        self.shows_unsharded = True
        self._slots = [
            (module._parameters, name, pair.unsharded, pair.sharded, fqn)
            for pair in pairs
            for (module, name), fqn in zip(pair.managed.slots, pair.managed.fqns, strict=True)
        ]

    def show(self, unsharded: bool, before: Callable[[], None] = lambda: None) -> None:
        """Shows unsharded or sharded parameters; runs `before` first if that is a change.
        RuntimeError, before anything is changed, if a slot does not hold what was put there: a
        weight that was tied or rebuilt after sharding would be undone here in silence."""
        if unsharded is self.shows_unsharded:
            return
        now, then = (3, 2) if unsharded else (2, 3)
        for slot in self._slots:
            if slot[0].get(slot[1]) is not slot[now]:
                raise RuntimeError(_replaced(slot[4]))
        before()
        for slot in self._slots:
            slot[0][slot[1]] = slot[then]  # type: ignore[assignment]
        self.shows_unsharded = unsharded


def _replaced(fqn: str) -> str:
    return (
        f"parameter {fqn} was replaced or removed after the model was sharded (by an assignment, "
        "tie_weights(), a parametrization, functional_call), so the flat buffers have neither "
        "its values nor its attributes. Do that before sharding the model, and change values by "
        "load_state_dict"
    )
