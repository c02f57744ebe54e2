"""The two identities of a parameter, and which of them the module tree shows.

Inside forward and backward a module's slot holds the *raw* parameter, a plain tensor over the
gathered weights. Outside it holds the *optimizer* parameter, a DTensor over this rank's rows of
the main weights. Both objects are made once: optimizer groups, name caches and state dicts go by
object identity.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .group import ParamGroup
from .partition import ManagedParam


class Identity(enum.Enum):
    RAW = "raw"
    OPTIMIZER = "optimizer"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def as_dtensor(local: torch.Tensor, group: ParamGroup, index: int) -> DTensor:
    """A DTensor of item `index`'s global shape over this rank's rows `local`.

    The mesh may end in an axis over which the model itself splits tensors: the global shape is
    then that of the whole tensor, of which the group's layout has one part. Rows are split
    unevenly and without communication: shape and stride are stated, so torch neither checks nor
    infers them. `local` is aliased.
    """
    shape = group.layout.specs[index].layout_shape
    placements: list[Placement] = []
    if group.domain.outer is not None:
        placements.append(Shard(0) if group.splits_outer else Replicate())
    placements.append(Shard(0) if group.config.strategy.shard_main else Replicate())
    if group.domain.mesh.ndim > len(placements):
        split = group.managed[index].split
        placements.append(Replicate() if split is None else Shard(split))
        if split is not None:
            parts = group.domain.mesh.size(-1)
            shape = (*shape[:split], shape[split] * parts, *shape[split + 1 :])
    return DTensor.from_local(
        local,
        group.domain.mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=contiguous_stride(shape),
    )


@dataclass(frozen=True)
class ParamPair:
    """Both identities of one parameter, and its gradient as the optimizer sees it.

    `grad` aliases this rank's rows of the main gradients; None for a frozen parameter.
    """

    managed: ManagedParam
    group: ParamGroup
    index: int
    optimizer: nn.Parameter
    grad: DTensor | None

    @property
    def raw(self) -> nn.Parameter:
        return self.managed.param

    def attach_grad(self) -> None:
        """One DTensor under both names that optimizers look at."""
        self.optimizer.grad = self.optimizer.decoupled_grad = self.grad  # type: ignore[assignment,attr-defined]

    def drop_grad(self) -> None:
        self.optimizer.grad = self.optimizer.decoupled_grad = None  # type: ignore[attr-defined]


def make_pairs(groups: Sequence[ParamGroup]) -> list[ParamPair]:
    """Optimizer parameters and gradients for every parameter of `groups`. The gradient buffers
    may be released."""
    pairs = []
    for group in groups:
        trainable = group.key.requires_grad
        for index, managed in enumerate(group.managed):
            optimizer = nn.Parameter(
                as_dtensor(group.main_items[index], group, index), requires_grad=trainable
            )
            grad = as_dtensor(group.grad_items[index], group, index) if trainable else None
            if grad is not None and grad.dtype != optimizer.dtype:
                optimizer.grad_dtype = grad.dtype  # type: ignore[attr-defined]
            pairs.append(ParamPair(managed, group, index, optimizer, grad))
    return pairs


class IdentitySwitch:
    """Puts one identity or the other into every slot of the module tree, tied slots included."""

    def __init__(self, pairs: Sequence[ParamPair]) -> None:
        self.shown = Identity.RAW
        self._slots = [
            (module._parameters, name, pair.raw, pair.optimizer)
            for pair in pairs
            for module, name in pair.managed.slots
        ]

    def show(self, identity: Identity, before: Callable[[], None] = lambda: None) -> None:
        """Shows `identity`; runs `before` first if that is a change."""
        if identity is self.shown:
            return
        before()
        position = 2 if identity is Identity.RAW else 3
        for slot in self._slots:
            slot[0][slot[1]] = slot[position]  # type: ignore[assignment]
        self.shown = identity
