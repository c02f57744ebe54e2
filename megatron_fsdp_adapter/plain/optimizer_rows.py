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

from ..build.shard_attributes import engines_behind, params_of
from ..core.dtensor.uneven import UnevenDTensor, with_chunks


@functools.cache
def watch_steps() -> None:
    """Registers hooks before and after the steps of all optimizers, once a process. They cut the
    state of sharded parameters as these are cut."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_cut_state)


def _before_step(optimizer: Any, *_: Any) -> None:
    """Cuts state as its parameters are, after checks. Tells engines that a step begins.

    RuntimeError:
    - an optimizer that would compute with one rank's part of a norm (Adafactor);
    - parameters from before sharding, which would find no gradients;
    - torch's Adam without `fully_shard_optimizer`, if gradients have another dtype than parameters.
    """
    params = params_of(optimizer)
    sharded = [param for param in params if hasattr(param, "_fsdp_engine")]
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
    if not hasattr(optimizer, "_fsdp_engines"):
        for engine in engines_behind(sharded):
            engine.begin_step()
    _cut_state(optimizer)


def _cut_state(optimizer: Any, *_: Any) -> None:
    """Replaces plain DTensors in the state of an optimizer by ones that know their rows. Plain ones
    are made by `distribute_tensor`, which cuts evenly, and by torch before 2.13 of our DTensors."""
    for param, state in optimizer.state.items():
        if not isinstance(param, UnevenDTensor):
            continue
        recut = {}  # the state is updated at the end: if one raises, none is replaced
        for key, value in state.items():
            is_cut_otherwise = isinstance(value, DTensor) and not isinstance(value, UnevenDTensor)
            if is_cut_otherwise and value.shape == param.shape:
                recut[key] = _rows_of(param, value, key)
        state.update(recut)


def _rows_of(param: UnevenDTensor, value: DTensor, key: str) -> UnevenDTensor:
    """`value` cut as `param` is. Collective from torch 2.13 on.

    RuntimeError: an older torch does not tell how `value` is cut, and its local shape differs.
    """
    alike: Any = torch.zeros_like(param, dtype=value.dtype)
    # From torch 2.13 on `zeros_like` of our DTensor is one of ours. Then a plain `value` is cut
    # evenly. Before, it may also have our rows, which its shape tells.
    if isinstance(alike, UnevenDTensor):
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
