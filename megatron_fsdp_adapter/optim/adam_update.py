"""The arguments of a multi-tensor Adam kernel, beside the table of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .multi_tensor import Lists, Table

CHUNK = 8192
"""Elements of a tensor that one program of the kernel updates."""


@dataclass(frozen=True)
class Update:
    """What an update of Adam reads beside tensors, as float32. clip: one number on the device that
    gradients are multiplied by first; None for 1. decoupled: weight decay is AdamW's."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float
    decoupled: bool
    weight_decay: float
    clip: torch.Tensor | None = None


Kernel = Callable[[Table, Lists, Update], None]
"""Updates weights and moments in place. Lists: gradients, weights, first and second moments."""
