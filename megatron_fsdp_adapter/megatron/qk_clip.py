"""Core's QK clipping on sharded weights.

After a step core multiplies rows of the query and key weights of layers whose attention logits
became too large. It does so on whole weights, which no rank has. The factors are core's own: its
method is shown a column of ones in the place of each weight, and what it makes of it are the
factors of the rows. This rank multiplies the rows of main weights that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import qk_clip as core_qk_clip
from torch import nn

from ..checkpoint.parts import held_range
from ..core.layout.spec import row_granularity
from ..sharding.sharded_module import engines_behind
from .inner_module import ShardedModule

_CORE_CLIP_QK = core_qk_clip.clip_qk
LAYERS = "decoder"
"""Attributes in which core looks for layers, in what it takes for the model."""


def clip_qk(model: Sequence[Any], *args: Any, **kwargs: Any) -> float:
    """Core's function of that name, for its wrappers and ours.

    Core expects the model two levels below each chunk. Below ours that is a Float16Module, if
    there is one.
    """
    return float(_CORE_CLIP_QK([_as_core_sees(chunk) for chunk in model], *args, **kwargs))


def _as_core_sees(chunk: Any) -> Any:
    if not isinstance(getattr(chunk, "module", None), ShardedModule):
        return chunk
    inner = chunk.module.module
    while not hasattr(inner, LAYERS) and hasattr(inner, "module"):
        inner = inner.module
    return SimpleNamespace(module=SimpleNamespace(module=inner))


def _engine_of(attention: nn.Module) -> Any | None:
    """The engine that holds the weights of an attention layer; None if they are not ours."""
    return next(iter(engines_behind(attention.parameters())), None)


@torch.no_grad()
def clip_sharded(original: Callable[[Any], None], attention: Any) -> None:
    """Clips in place of an attention layer's `clip_qk`."""
    engine = _engine_of(attention)
    if engine is None:
        original(attention)
        return
    with _ones_for_weights(attention) as columns:
        original(attention)
    clipped = any(bool((factors != 1).any()) for _, factors in columns)
    if not _on_any_rank(clipped, attention.pg_collection.tp, engine.runtime.device):
        return
    engine.to_sharded()
    weights: list[Any] = [layer.weight for layer, _ in columns]
    for weight, (_, factors) in zip(weights, columns, strict=True):
        _multiply_rows(weight, factors)
    # Quantized weights are made again only on a notification.
    engine.main_weights_changed(loaded=not all(weight.requires_grad for weight in weights))


def _on_any_rank(clipped: bool, tensor: Any, device: torch.device) -> bool:
    """True if a tensor-parallel rank has clipped heads of a layer. Data-parallel ranks have the
    same logits. Ranks of other heads may share experts, and what one gathers again all must."""
    if dist.get_world_size(tensor) == 1:
        return clipped
    found = torch.tensor(clipped, dtype=torch.int32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, tensor)
    return bool(found)


@contextmanager
def _ones_for_weights(attention: nn.Module) -> Iterator[list[tuple[nn.Module, torch.Tensor]]]:
    """Inside, each linear layer directly below `attention` shows a column of ones, of as many rows
    as its weight has on this tensor-parallel rank. Gives the layers, each with its column; their
    weights are back outside, in the identity that was shown."""
    layers: list[tuple[nn.Module, Any]] = [
        (layer, getattr(layer, "weight", None)) for layer in attention.children()
    ]
    shown = [
        (layer, weight)
        for layer, weight in layers
        if hasattr(weight, "_fsdp_engine") and weight.dim() == 2
    ]
    columns = []
    try:
        for layer, weight in shown:
            raw = getattr(weight, "orig_param", weight)  # without what tensor parallelism cuts off
            ones = torch.ones(raw.shape[0], 1, dtype=torch.float32, device=raw.device)
            layer._parameters["weight"] = nn.Parameter(ones, requires_grad=False)
            columns.append((layer, ones))
        yield columns
    finally:
        for layer, weight in shown:
            layer._parameters["weight"] = weight


def _multiply_rows(weight: Any, factors: torch.Tensor) -> None:
    """Multiplies this rank's rows of `weight` by their factors, of (rows, 1), each."""
    ref, local = weight.fsdp_layout_ref, weight._local_tensor
    if local.numel() == 0:
        return
    first = held_range(ref).start // row_granularity(ref.shape)
    own = factors[first : first + local.shape[0]]
    local.mul_(own.to(local.device, local.dtype))
