"""Core's gradient norm and clipping, on local tensors; the clip where the optimizer's step reads
gradients anyway, if it can be there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    get_grad_norm_fp32,
)

from ..sharding.local_optimizer import LocalPair, LocalShards
from ..sharding.squares_of_sums import SquaresOfSums
from .inner import our_chunks
from .seams import core_api

EPS = 1e-6
"""What core adds to a norm before it divides by it."""


@dataclass(frozen=True)
class ClipByNorms:
    """Clips gradients by the norm of their group to `largest`.

    norms: of the model's gradients (None), and of groups that have norms of their own: numbers, or
    tensors on the device. decoupled: gradients are where FusedAdam reads those of other dtypes.
    known: squares of them, which are others then.
    """

    norms: Mapping[str | None, Any]
    largest: float
    decoupled: bool
    known: SquaresOfSums | None = None

    def __call__(self, pairs: list[LocalPair]) -> None:
        if self.known is not None:
            self.known.forget()
        for group, norm in self.norms.items():
            held = [
                local
                for param, local in pairs
                if local.numel() > 0 and core_api.norm_group(param) == group
            ]
            if held:
                clip_grad_by_total_norm_fp32(
                    held, self.largest, norm, use_decoupled_grad=self.decoupled
                )

    @property
    def is_one(self) -> bool:
        """Whether all gradients are multiplied by one factor."""
        return len(self.norms) == 1

    def factor(self, device: torch.device) -> torch.Tensor | None:
        """The one factor, as core computes it; None for 1."""
        (norm,) = self.norms.values()
        found = self.largest / (norm + EPS)
        if isinstance(found, torch.Tensor):
            return found.clamp_max(1.0)
        return torch.full((), found, device=device) if found < 1.0 else None


def gradients(optimizer: Any, group: str | None) -> list[torch.Tensor]:
    """The gradients that a norm counts on this rank: the model's, or that of a group."""
    found = getattr(optimizer, core_api.NORM_GRADIENTS)
    return found() if group is None else found(group)


def norm_of(optimizer: Any, group: str | None) -> Any:
    """The norm of the model's gradients (None), or of those of a group: a number, or float32 (1,)
    on the device, as core's is. Collective over the optimizer's ranks.

    From what reductions have left and our kernel where these take this rank's gradients, else from
    core's function. All add up ranks' sums of squares in one all-reduce of one float32, so ranks
    may differ in that."""
    held, ranks = gradients(optimizer, group), optimizer.get_grad_stats_parallel_group()
    squares = squares_of(held, optimizer)
    if squares is None:
        return get_grad_norm_fp32(held, grad_stats_parallel_group=ranks)
    dist.all_reduce(squares, group=ranks)
    return squares.sqrt() if core_api.norms_stay_on_device() else squares.item() ** 0.5


def writes_gradients_in_sight(chunks: Sequence[Any], config: Any) -> bool:
    """Whether torch sees who writes gradients between their reduction and their norm. Core's
    finalisation adds up some over tensor-parallel ranks and pipeline stages, by collectives in
    place and through `.data`; a gradient scaler divides all."""
    parallel = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    alone = all(getattr(chunk.config, size) == 1 for chunk in chunks for size in parallel)
    return alone and not config.fp16


def _finalises_as_core(chunk: Any) -> bool:
    """Not by a function, or a loop, of the user's, who may do the like."""
    function = chunk.config.finalize_model_grads_func
    while isinstance(function, functools.partial):
        function = function.func
    return function is finalize_model_grads


def squares_of(held: list[torch.Tensor], optimizer: Any) -> torch.Tensor | None:
    """The sum over `held`, float32 (1,) on their device; None where that is left to core."""
    shards: LocalShards = optimizer.optimizer._fsdp_shards
    known, rest = None, held
    if shards.of_sums is not None and all(map(_finalises_as_core, our_chunks(optimizer))):
        known, rest = shards.of_sums(held)
    if known is None:
        return shards.squares(held)
    if not rest:
        return known
    more = shards.squares(rest)
    return None if more is None else known + more


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
    asked = ClipByNorms(dict(norms), clip_grad, shards.decoupled, shards.of_sums)
    if not shards.takes_clip(asked):
        shards.clip_grads(asked)
    total = self.clipped_norm = norms.pop(None)
    self.grad_norms_by_group = norms  # where a training loop of 0.19 reads them
    return total


def clip_now(optimizer: Any) -> None:
    """Gradients are read before the step clips them."""
    shards = _shards(optimizer)
    if shards is not None:
        shards.clip_now()


def step(original: Callable[..., Any], self: Any) -> Any:
    """Inside, nobody reads gradients between clipping and the inner optimizer's step, but who says
    so. A step that is left out leaves clipped ones, as without this."""
    shards = _shards(self)
    if shards is None:
        return original(self)
    shards.step_follows = True
    try:
        return original(self)
    finally:
        shards.step_follows = False
        shards.clip_now()


def _shards(optimizer: Any) -> LocalShards | None:
    return getattr(getattr(optimizer, "optimizer", None), "_fsdp_shards", None)
