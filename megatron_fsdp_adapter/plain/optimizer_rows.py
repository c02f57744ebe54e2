"""Optimizers of torch over sharded parameters: their state is DTensors that know their rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..core.dtensor.uneven import UnevenDTensor, with_chunks


@functools.cache
def watch_steps() -> None:
    """Has each step of an optimizer, from the first sharded model on, begin with state that has the
    rows of its parameters, and end with such."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_own_rows)


def _before_step(optimizer: Any, *_: Any) -> None:
    """RuntimeError for parameters from before sharding, which would find no gradients, for an
    optimizer that computes with its own rank's part of a norm, and for Adam with gradients in
    another dtype than their parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = [param for param in params if isinstance(param, UnevenDTensor)]
    if isinstance(optimizer, torch.optim.Adafactor) and sharded:
        raise RuntimeError(
            "optimizer=Adafactor: its step reads norms of whole tensors as numbers, of which each "
            "rank would have its own rows' part. Use AdamW"
        )
    if any(hasattr(param, "_fsdp_label") for param in params):
        raise RuntimeError(
            f"{type(optimizer).__name__}: its parameters are from before the model was sharded. "
            "Make the optimizer from parameters() of the sharded model, after the last call of "
            "fully_shard"
        )
    if isinstance(optimizer, torch.optim.Adam) and not hasattr(optimizer, "_fsdp_engines"):
        for param in sharded:
            grad = param.grad
            if grad is not None and grad.dtype != param.dtype:
                raise RuntimeError(
                    f"optimizer={type(optimizer).__name__}: a parameter is in {param.dtype} and "
                    f"its gradients accumulate in {grad.dtype}, which torch's Adam does not "
                    "combine. Call megatron_fsdp_adapter.fully_shard_optimizer(optimizer) first"
                )
    _own_rows(optimizer)


def _own_rows(optimizer: Any, *_: Any) -> None:
    """Makes DTensors in the state of an optimizer ones that know the rows that they have: those of
    `distribute_tensor`, which cuts evenly, and those that torch before 2.13 makes of ours."""
    for param, state in optimizer.state.items():
        if not isinstance(param, UnevenDTensor):
            continue
        recut = {}  # all or none, if one raises
        for key, value in state.items():
            is_cut_otherwise = isinstance(value, DTensor) and not isinstance(value, UnevenDTensor)
            if is_cut_otherwise and value.shape == param.shape:
                recut[key] = _rows_of(param, value, key)
        state.update(recut)


def _rows_of(param: UnevenDTensor, value: DTensor, key: str) -> UnevenDTensor:
    """`value` cut as `param` is. Collective where torch has cut it evenly.

    RuntimeError where torch does not know that, and the value has other rows.
    """
    alike: Any = torch.zeros_like(param, dtype=value.dtype)
    if isinstance(alike, UnevenDTensor):  # from torch 2.13 on what has our rows is one
        alike.chunks.take_from(value.full_tensor(), alike._local_tensor)  # type: ignore[union-attr]
        return alike
    if value._local_tensor.shape != param._local_tensor.shape:
        raise RuntimeError(
            f"optimizer state {key!r} has the local shape {tuple(value._local_tensor.shape)}, but "
            f"the parameter has {tuple(param._local_tensor.shape)} on this rank, and torch "
            f"{torch.__version__} does not report the cut. Load it by set_optimizer_state_dict, "
            "or use torch 2.13"
        )
    return with_chunks(value, param.chunks)
