"""Options of parameter groups that are tensors on the device: what a CUDA graph of a step reads.

A fused Adam that is `capturable` has its learning rate and its count of steps there. They are
filled, never replaced: a graph goes on reading the tensor that it was captured with. A checkpoint
has numbers, with graphs and without, so that either reads the other's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

COUNT = "step"
"""The option in which fused optimizers count the steps of a group."""


def first_count(group: Mapping[str, Any]) -> Any:
    """Steps of a group before its first: a tensor of one element where the learning rate is one."""
    rate = group.get("lr")
    if not isinstance(rate, torch.Tensor):
        return 0
    return torch.zeros(1, dtype=torch.int32, device=rate.device)


def as_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group with numbers for tensors of one element. Waits for the device."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in options.items()
    }


def load_options(group: dict[str, Any], saved: Mapping[str, Any], kept: Collection[str]) -> None:
    """Gives a group the saved options but those in `kept`; what is a tensor is filled. A group
    that had counted no step when it was saved has counted none then."""
    for name, value in saved.items():
        if name in kept:
            continue
        held = group.get(name)
        if (
            isinstance(held, torch.Tensor)
            and held.numel() == 1
            and isinstance(value, int | float | torch.Tensor)
        ):
            held.copy_(torch.as_tensor(value).view(held.shape))
        else:
            group[name] = value
    if COUNT in group and COUNT not in saved and COUNT not in kept:
        if isinstance(group[COUNT], torch.Tensor):
            group[COUNT].zero_()
        else:
            group[COUNT] = 0

