"""What a kernel of Adam for many tensors is told, beside where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .tensor_table import Lists, Table

CHUNK = 8192
"""Elements of a tensor that one program of the kernel updates."""
Number = float | torch.Tensor
"""As it is, or as one float32 on the device."""


@dataclass(frozen=True)
class Update:
    """What an update of Adam reads beside tensors, as float32. clip: one number on the device that
    gradients are multiplied by first; None for 1. decoupled: weight decay is AdamW's.

    scale, overflow: one float32 and one int32 on the device, where a CUDA graph may have the
    update: gradients are multiplied by `scale` then, and written back if it is not 1; with an
    `overflow` of 1 nothing is updated. lr and both corrections are on the device, too. Otherwise
    they are numbers, and these None.

    Raises:
        ValueError: some of these are on the device, and others are not.
    """

    lr: Number
    beta1: float
    beta2: float
    eps: float
    correction1: Number
    correction2: Number
    decoupled: bool
    weight_decay: float
    clip: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    overflow: torch.Tensor | None = None

    def __post_init__(self) -> None:
        told = (self.lr, self.correction1, self.correction2, self.scale, self.overflow)
        if len({isinstance(value, torch.Tensor) for value in told}) != 1:
            raise ValueError(
                f"lr, correction1, correction2, scale and overflow are {told}; give tensors for "
                "all of them, or numbers, and None for the last two"
            )

    @property
    def on_device(self) -> bool:
        """Whether the kernel reads from memory what may change between replays."""
        return self.scale is not None


Kernel = Callable[[Table, Lists, Update], None]
"""Updates weights and moments in place. Lists: gradients, weights, first and second moments."""
