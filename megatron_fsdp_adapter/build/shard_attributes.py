"""Attributes of sharded parameters: those of the module's own parameters, and the place in a
checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..core.dtensor.blocks import Chunks
from ..core.dtensor.chunks import LayoutRef
from ..core.dtensor.uneven import UnevenDTensor
from ..core.engine.params import ParamPair
from ..quantized import attributes_of_class

UNSHARDED_ONLY = (
    "__fsdp_param__",
    "get_main_grad",
    "grad_added_to_main_grad",
    "main_grad",
    "overwrite_main_grad",
)
"""Attributes of the unsharded parameter alone. Modules that write gradients by themselves read them
there."""


def mark_shard(pair: ParamPair, offset: tuple[int, ...] | None = None) -> None:
    """Copies the attributes of the module's own parameter to the sharded one, and marks the sharded
    one with its rows in the whole tensor, for torch DCP too. offset: the place in the whole tensor
    where this rank's tensor-parallel part begins; None for the origin."""
    param = pair.sharded
    held = pair.group.shards.held
    if pair.managed.extension is not None:  # as of torch's FSDP2, it has nothing of the class
        return
    _copy_attributes(pair.unsharded, param)
    if pair.managed.dtensor is not None:  # torch knows its place, over both meshes
        return
    rows = held.range(pair.index)
    ref = LayoutRef(held.layout, pair.index, held.rank, offset)
    param.megatron_fsdp_slice = slice(rows.start, rows.stop)  # type: ignore[attr-defined]
    param.fsdp_layout_ref = ref  # type: ignore[attr-defined]
    for value in (param, pair.grad):
        if isinstance(value, UnevenDTensor):
            value.chunks = Chunks(ref.chunks(), (ref.layout, ref.index))


def _copy_attributes(unsharded: nn.Parameter, sharded: nn.Parameter) -> None:
    """Copies attributes. Code that groups, clips, reduces or names parameters may read any of them,
    so all are copied except: `UNSHARDED_ONLY`, those of the engine ("_fsdp_"), and those in which a
    class of quantized tensors keeps its values. Attributes that `sharded` has already stay."""
    left_out = {*UNSHARDED_ONLY, *attributes_of_class(unsharded), *vars(sharded)}
    for name, value in vars(unsharded).items():
        if name not in left_out and not name.startswith("_fsdp_"):
            setattr(sharded, name, value)


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def engines_behind(params: Iterable[Any]) -> list[Any]:
    """The living engines that any of `params` belong to, each once."""
    found = {}
    for param in params:
        ref = getattr(param, "_fsdp_engine", None)
        engine = None if ref is None else ref()
        if engine is not None:
            found[id(engine)] = engine
    return list(found.values())
