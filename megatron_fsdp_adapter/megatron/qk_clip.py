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
from megatron.core.optimizer import qk_clip as core_qk_clip
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn

from ..checkpoint.parts import held_range
from ..core.layout.spec import row_granularity
from .inner import ShardedModule
from .seams.core_api import Replacement

_CORE_CLIP_QK = core_qk_clip.clip_qk
LAYERS = "decoder"
"""Where core looks for layers, in what it takes for the model."""


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
    found = (getattr(param, "_fsdp_engine", None) for param in attention.parameters())
    engine = next((reference for reference in found if reference is not None), None)
    return None if engine is None else engine()


@torch.no_grad()
def clip_sharded(original: Callable[[Any], None], attention: Any) -> None:
    """In the place of an attention layer's `clip_qk`."""
    engine = _engine_of(attention)
    if engine is None:
        original(attention)
        return
    engine.show_optimizer_params()
    with _ones_for_weights(attention) as columns:
        original(attention)
    weights = [weight for weight, _ in columns]
    for weight, factors in columns:
        _multiply_rows(weight, factors)
    # Quantised weights are made anew only if it is said. On all ranks, clipped or not: ranks of
    # other heads, which tensor parallelism makes, may share experts, and what one does again all of
    # them must.
    engine.main_weights_changed(loaded=not all(weight.requires_grad for weight in weights))


@contextmanager
def _ones_for_weights(attention: nn.Module) -> Iterator[list[tuple[Any, torch.Tensor]]]:
    """Inside, each linear layer directly below `attention` shows a column of ones, of as many rows
    as its weight has on this tensor-parallel rank. Gives the sharded weights, each with its column;
    they are back outside."""
    layers: list[tuple[nn.Module, Any]] = [
        (layer, getattr(layer, "weight", None)) for layer in attention.children()
    ]
    shown = [
        (layer, weight)
        for layer, weight in layers
        if hasattr(weight, "fsdp_layout_ref") and len(weight.fsdp_layout_ref.shape) == 2
    ]
    columns = []
    try:
        for layer, weight in shown:
            rows = weight.fsdp_layout_ref.shape[0]
            ones = torch.ones(rows, 1, dtype=torch.float32, device=weight.device)
            layer._parameters["weight"] = nn.Parameter(ones, requires_grad=False)
            columns.append((weight, ones))
        yield columns
    finally:
        for layer, weight in shown:
            layer._parameters["weight"] = weight


def _multiply_rows(weight: Any, factors: torch.Tensor) -> None:
    """Multiplies this rank's elements of `weight` by the factors of their rows, (rows, 1)."""
    ref, local = weight.fsdp_layout_ref, weight._local_tensor
    if local.numel() == 0:
        return
    held, row = held_range(ref), row_granularity(ref.shape)
    numbers = torch.arange(held.start, held.stop, device=local.device) // row
    flat = local.view(-1)
    flat.mul_(factors.view(-1).to(flat.device)[numbers].to(flat.dtype))


REPLACED: tuple[Replacement, ...] = tuple(
    Replacement(owner, "clip_qk", clip_sharded, (("self",),))
    for owner in (SelfAttention, MLASelfAttention)
)
