"""Core's gradient norm and clipping, on local tensors; the clip where the optimizer's step reads
gradients anyway, if it can be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    get_grad_norm_fp32,
)

from ..optim.local_shards import Clip, LocalPair, LocalShards
from .compat import core_api
from .inner_module import our_chunks

EPS = 1e-6
"""What core adds to a norm before it divides by it."""


def clip_by(norms: Mapping[str | None, Any], largest: float, decoupled: bool) -> Clip:
    """Clips gradients by the norm of their group to `largest`.

    norms: of the model's gradients (None), and of groups that have norms of their own: numbers, or
    tensors on the device. decoupled: gradients are where FusedAdam reads those of other dtypes.
    """

    def apply(pairs: list[LocalPair]) -> None:
        for group, norm in norms.items():
            held = [
                local
                for param, local in pairs
                if local.numel() > 0 and core_api.norm_group(param) == group
            ]
            if held:
                clip_grad_by_total_norm_fp32(held, largest, norm, use_decoupled_grad=decoupled)

    def factor(device: torch.device) -> torch.Tensor | None:
        """As core computes it."""
        found = largest / (norms[None] + EPS)
        if isinstance(found, torch.Tensor):
            return found.clamp_max(1.0)
        return torch.full((), found, device=device) if found < 1.0 else None

    return Clip(apply, factor if len(norms) == 1 else None)


def gradients(optimizer: Any, group: str | None) -> list[torch.Tensor]:
    """The gradients that a norm counts on this rank: the model's, or that of a group."""
    found = getattr(optimizer, core_api.NORM_GRADIENTS)
    return found() if group is None else found(group)


def norm_of(optimizer: Any, group: str | None) -> Any:
    """The norm of the model's gradients (None), or of those of a group: a number, or float32 (1,)
    on the device. Collective over the optimizer's ranks."""
    return get_grad_norm_fp32(
        gradients(optimizer, group),
        grad_stats_parallel_group=optimizer.get_grad_stats_parallel_group(),
    )


def clip(original: Callable[..., Any], self: Any, clip_grad: float) -> Any:
    """Core's own norm and clipping, given local tensors: none is empty (`optimizer._norm_grads`),
    and none pays DTensor dispatch. Parameters of a group with a norm of its own are clipped by it.
    """
    if not our_chunks(self) or self.is_stub_optimizer:
        return original(self, clip_grad)
    norms = {
        group: norm_of(self, group) for group in (None, *core_api.present_norm_groups(self))
    }
    shards: LocalShards = self.optimizer._fsdp_shards
    shards.follow_groups(self.optimizer)
    shards.clip_grads(clip_by(dict(norms), clip_grad, shards.decoupled))
    total = self.clipped_norm = norms.pop(None)
    self.grad_norms_by_group = norms  # where a training loop of 0.19 reads them
    return total


def clip_now(optimizer: Any) -> None:
    """Gradients are read before the step clips them."""
    shards = _shards(optimizer)
    if shards is not None:
        shards.clip_now()


def step(original: Callable[..., Any], self: Any) -> Any:
    """Inside, gradients between clipping and the inner optimizer's step are read only by code that
    reports it. A step that is left out leaves clipped ones, as without this."""
    shards = _shards(self)
    if shards is None:
        return original(self)
    shards.step_follows = True
    try:
        return original(self)
    finally:
        shards.clip_now()


def _shards(optimizer: Any) -> LocalShards | None:
    return getattr(getattr(optimizer, "optimizer", None), "_fsdp_shards", None)
