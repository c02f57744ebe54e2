"""Attributes of sharded parameters: those of the module's own, and the place in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..core.dtensor.chunks import LayoutRef
from ..core.dtensor.uneven import Chunks
from ..core.engine.params import ParamPair
from ..quantized import attributes_of_class

OF_RAW = (
    "__fsdp_param__",
    "get_main_grad",
    "grad_added_to_main_grad",
    "main_grad",
    "overwrite_main_grad",
)
"""Attributes that modules that write gradients by themselves read, on the parameter that they
compute with."""


def mark_shard(pair: ParamPair, offset: tuple[int, ...] | None = None) -> None:
    """Copies the attributes of the module's own parameter to the sharded one, and marks, for torch
    DCP too, which rows of which tensor it is. `offset` is where this rank's tensor-parallel part
    begins in the whole tensor; None at the origin."""
    param = pair.sharded
    held = pair.group.held
    _copy_attributes(pair.unsharded, param)
    rows = held.range(pair.index)
    ref = LayoutRef(held.layout, pair.index, held.rank, offset)
    param.megatron_fsdp_slice = slice(rows.start, rows.stop)  # type: ignore[attr-defined]
    param.fsdp_layout_ref = ref  # type: ignore[attr-defined]
    for value in (param, pair.grad):
        if value is not None:
            value.chunks = Chunks(ref.chunks(), (ref.layout, ref.index))  # type: ignore[union-attr]


def _copy_attributes(raw: nn.Parameter, optimizer: nn.Parameter) -> None:
    """Code that groups, clips, reduces or names parameters may go by any attribute: all are copied,
    but those of the engine and those by which a class of quantized tensors keeps its values. What
    `optimizer` has already stays."""
    left_out = {*OF_RAW, *attributes_of_class(raw), *vars(optimizer)}
    for name, value in vars(raw).items():
        if name not in left_out and not name.startswith("_fsdp_"):
            setattr(optimizer, name, value)


def engines_behind(params: Iterable[Any]) -> list[Any]:
    """The engines that any of `params` belong to, each once."""
    found = {}
    for param in params:
        ref = getattr(param, "_fsdp_engine", None)
        engine = None if ref is None else ref()
        if engine is not None:
            found[id(engine)] = engine
    return list(found.values())
