"""The seam to Megatron's optimizer: the one place that adapts it, while no file of it is edited.

`install()` replaces a few methods of core's `DistributedOptimizer` by versions that act only when
the model chunks are ours, and hand over to the original otherwise. The inner optimizer (torch
AdamW, TE or apex FusedAdam) gets a subclass of its own class that steps on *local* tensors.

Why local: the parameters are DTensors. TE's FusedAdam allocates state of their global shape
(60 GiB on an 8B model), and torch's goes through DTensor dispatch for every operation of every
parameter. The local tensors are made once, and what the inner optimizer keeps for them is shown
to checkpoints as DTensors over the same storage.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    get_grad_norm_fp32,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch.distributed.tensor import DTensor

from . import support
from .checkpoint.chunks import copy_chunks, dtensor_like, has_chunks


class LocalShards:
    """The local tensors behind an inner optimizer's DTensor parameters, and their state.

    `state` is keyed by local tensor and is what the inner optimizer reads and writes while it
    steps; `optimizer.state`, keyed by parameter, shows the same storages as DTensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, skip_empty: bool) -> None:
        self.skip_empty = skip_empty
        self.pairs = [
            [(param, param._local_tensor) for param in group["params"]]
            for group in optimizer.param_groups
        ]
        self.state: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)

    def locals_of(self, index: int) -> list[torch.Tensor]:
        """What the inner optimizer is given in place of group `index`'s parameters."""
        return [
            local for _, local in self.pairs[index] if local.numel() > 0 or not self.skip_empty
        ]

    def hand_out_grads(self) -> None:
        """Each local tensor's `.grad` is the local tensor of its parameter's gradient."""
        for pairs in self.pairs:
            for param, local in pairs:
                grad = param.grad
                local.grad = None if grad is None else grad._local_tensor

    def take_back_grads(self) -> None:
        for pairs in self.pairs:
            for _, local in pairs:
                local.grad = None

    def show_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts state that is new since the last call under the parameters, as DTensors."""
        for pairs in self.pairs:
            for param, local in pairs:
                if param not in optimizer.state and local in self.state:
                    optimizer.state[param] = {
                        name: _shown(param, local, value)
                        for name, value in self.state[local].items()
                    }


def _shown(param: Any, local: torch.Tensor, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == local.shape and value.dim() > 0:
        return dtensor_like(param, value)
    return value


@contextmanager
def _on_locals(optimizer: Any) -> Iterator[LocalShards]:
    """Inside, the inner optimizer's parameters and state are the local ones."""
    shards: LocalShards = optimizer._fsdp_shards
    shown_state = optimizer.state
    shown_params = [group["params"] for group in optimizer.param_groups]
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = shards.locals_of(index)
    optimizer.state = shards.state
    try:
        yield shards
    finally:
        optimizer.state = shown_state
        for group, params in zip(optimizer.param_groups, shown_params, strict=True):
            group["params"] = params
        shards.show_state(optimizer)


def _step(optimizer: Any, base: type, closure: Any = None) -> Any:
    with _on_locals(optimizer) as shards:
        shards.hand_out_grads()
        try:
            return base.step(optimizer, closure)  # type: ignore[attr-defined]
        finally:
            shards.take_back_grads()


def _init_torch_state(optimizer: Any, group: dict[str, Any]) -> None:
    """torch's own initialisation of a group's state, which it runs at the start of a step. It
    skips parameters without a gradient, so each one stands in as its own for the moment."""
    for local in group["params"]:
        local.grad = local.detach()
    try:
        optimizer._init_group(group, [], [], [], [], [], [])
    finally:
        for local in group["params"]:
            local.grad = None


def _init_fused_state(optimizer: Any, group: dict[str, Any]) -> None:
    """TE's and apex's FusedAdam keep two moments a parameter and the step in the group."""
    for local in group["params"]:
        if optimizer.state[local]:
            continue
        if hasattr(optimizer, "initialize_state"):
            optimizer.initialize_state(local, getattr(optimizer, "store_param_remainders", False))
        else:
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[local][name] = torch.zeros_like(local, dtype=torch.float32)


def _is_torch_optimizer(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Adam)


@torch.no_grad()
def initialize_state(optimizer: Any) -> None:
    """State for every parameter, empty shards included, without taking a step: neither weights
    nor the step count change."""
    with _on_locals(optimizer) as shards:
        for group in optimizer.param_groups:
            if _is_torch_optimizer(optimizer):
                _init_torch_state(optimizer, group)
            else:
                _init_fused_state(optimizer, group)
        _complete_empty_state(shards)


def _complete_empty_state(shards: LocalShards) -> None:
    """Moments of zero size for empty shards that the inner optimizer is not given, so that every
    rank has the same keys."""
    for pairs in shards.pairs:
        for _, local in pairs:
            if local.numel() == 0 and not shards.state[local]:
                shards.state[local] = {
                    name: torch.zeros_like(local, dtype=torch.float32)
                    for name in ("exp_avg", "exp_avg_sq")
                }


@torch.no_grad()
def _load_state_dict(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Copies a state dict into existing state, in place and in local shape.

    Raises:
        ValueError: its groups do not have this optimizer's numbers of parameters.
    """
    current, saved = optimizer.param_groups, state_dict["param_groups"]
    sizes = [len(group["params"]) for group in current]
    if sizes != [len(group["params"]) for group in saved]:
        raise ValueError(
            f"optimizer state has groups of {[len(g['params']) for g in saved]} parameters, this "
            f"optimizer has groups of {sizes}: it belongs to another model or another weight "
            "decay or learning rate rule"
        )
    initialize_state(optimizer)
    for group, saved_group in zip(current, saved, strict=True):
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                _load_value(optimizer, param, name, value)
        group.update({k: v for k, v in saved_group.items() if k != "params"})


def _load_value(optimizer: Any, param: Any, name: str, value: Any) -> None:
    target: Any = optimizer.state[param].get(name)
    if not isinstance(target, torch.Tensor):
        optimizer.state[param][name] = value
        optimizer._fsdp_shards.state[param._local_tensor][name] = value
        return
    source = getattr(value, "_local_tensor", value)
    local = getattr(target, "_local_tensor", target)
    source = torch.as_tensor(source, dtype=local.dtype)
    if source.numel() == _global_numel(param) != local.numel():
        source = source.reshape(-1)[param.megatron_fsdp_slice]
    if source.data_ptr() != local.data_ptr():
        local.copy_(source.view(local.shape))
    if isinstance(target, DTensor) and not has_chunks(target):
        copy_chunks(param, target)


def _global_numel(param: Any) -> int:
    """Elements of the module's own parameter, of which this rank holds rows."""
    return math.prod(param.fsdp_layout_ref.shape)


@functools.cache
def local_step_class(base: type) -> type:
    """A subclass of the inner optimizer's class that steps, and loads, on local shards."""

    def step(self: Any, closure: Any = None) -> Any:
        return _step(self, base, closure)

    return type(
        base.__name__, (base,), {"step": step, "load_state_dict": _load_state_dict, "__doc__": (
            f"{base.__name__} on the local shards of DTensor parameters."
        )},
    )


def adopt(optimizer: torch.optim.Optimizer) -> None:
    """Makes the inner `optimizer` step on local shards. Its parameters must be DTensors."""
    skip_empty = not _is_torch_optimizer(optimizer)  # TE's kernel skips a group with one
    optimizer._fsdp_shards = LocalShards(optimizer, skip_empty)  # type: ignore[attr-defined]
    optimizer.__class__ = local_step_class(type(optimizer))  # type: ignore[arg-type]


# The methods of DistributedOptimizer.


def _ours(chunks: Sequence[Any]) -> list[Any]:
    from .adapter import FullyShardedDataParallel  # the adapter imports this module

    return [chunk for chunk in chunks if isinstance(chunk, FullyShardedDataParallel)]


def _our_chunks(optimizer: Any) -> list[Any]:
    return _ours(getattr(optimizer, "model_chunks", None) or [])


def _param_groups(
    original: Callable[..., Any], model_chunks: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """The first thing that core does for an optimizer. An unsupported option is refused here: the
    inner optimizer is made next, and some options fail there, in ways that do not name them."""
    if _ours(model_chunks):
        config = kwargs["config"] if "config" in kwargs else args[1]
        support.raise_problems(
            "Megatron's optimizer with FullyShardedDataParallel",
            support.problems(config, support.OPTIMIZER_CONFIG_RULES),
        )
    return original(model_chunks, *args, **kwargs)


def _init(original: Callable[..., None], self: Any, optimizer: Any, config: Any, *args: Any,
          **kwargs: Any) -> None:
    self.model_chunks = kwargs.get("model_chunks", [])
    ours = _our_chunks(self)
    original(self, optimizer, config, *args, **kwargs)
    if ours and optimizer is not None:
        adopt(optimizer)


def _grad_stats_group(original: Callable[..., Any], self: Any) -> Any:
    """The ranks over which each gradient element is counted once: an optimizer instance, or all of
    them where they split the shards again, which 0.16.1 does not know."""
    ours = _our_chunks(self)
    if not ours or not ours[0].megatron_fsdp_dist_index.hsdp_outer_dp_shard:
        return original(self)
    instances = ours[0].ddp_config.num_distributed_optimizer_instances
    counted = dist.get_world_size(original(self)) * instances
    if counted != dist.get_world_size():
        raise ValueError(
            f"outer_dp_sharding_strategy='optim': {instances} optimizer instances have {counted} "
            f"ranks of a world of {dist.get_world_size()}; there is no group for the gradient norm "
            "of a part of the world, use outer_dp_sharding_strategy='no_shard' there"
        )
    return dist.group.WORLD


def _init_states(original: Callable[..., None], self: Any) -> None:
    """0.16.1 takes a step with zero gradients, which decays weights and advances Adam's count."""
    if not _our_chunks(self):
        original(self)
        return
    initialize_state(self.optimizer)


def _unscaling_data(original: Callable[..., Any], self: Any) -> Any:
    """Local tensors: the inf check is one fused kernel over plain tensors."""
    if not _our_chunks(self):
        return original(self)
    return [
        param.grad._local_tensor
        for group in self.optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    ]


def _replicas(chunks: Sequence[Any]) -> set[int]:
    """Ids of the optimizer parameters whose gradient another rank counts: without sharding every
    rank of a domain holds the whole gradient, and the domain's first rank counts it."""
    return {
        id(pair.optimizer)
        for chunk in chunks
        if not chunk.engine.config.strategy.shard_main
        for pair in chunk.engine.pairs
        if pair.group.domain.axis.rank != 0
    }


def _norm_grads(original: Callable[..., Any], self: Any) -> Any:
    """Each gradient element on one rank of the group that core adds up over, as stock DDP's shards
    are. 0.16.1 adds up replicated gradients as well and is off by sqrt(dp); the model-parallel
    group was rejected, as expert and dense parameters have different ones.

    Without empty shards: TE's multi-tensor kernels drop a whole list that ends in an empty
    tensor, so the norm came out too small and nothing was clipped."""
    ours = _our_chunks(self)
    if not ours:
        return original(self)
    elsewhere = _replicas(ours)
    tp_group = getattr(self, "tp_group", None)
    grads = [
        param.grad._local_tensor
        for param in self.get_parameters()
        if param.grad is not None
        and id(param) not in elsewhere
        and param_is_not_shared(param)
        and param_is_not_tensor_parallel_duplicate(param, tp_group)
    ]
    return [grad for grad in grads if grad.numel() > 0]


def _count_zeros(original: Callable[..., Any], self: Any) -> Any:
    """Zeros among the elements that the norm counts; 0.16.1 counts replicas too."""
    if not _our_chunks(self):
        return original(self)
    grads = self.get_main_grads_for_grad_norm()
    device = self.get_parameters()[0]._local_tensor.device
    zeros = torch.zeros(1, dtype=torch.float32, device=device)
    for grad in grads:
        zeros += grad.numel() - torch.count_nonzero(grad)
    dist.all_reduce(zeros, group=self.get_grad_stats_parallel_group())
    return zeros.item()


def _clip(original: Callable[..., Any], self: Any, clip_grad: float) -> Any:
    """Core's own norm and clipping, given local tensors: none is empty (see `_norm_grads`), and
    none pays DTensor dispatch."""
    if not _our_chunks(self) or self.is_stub_optimizer:
        return original(self, clip_grad)
    norm = get_grad_norm_fp32(
        self.get_main_grads_for_grad_norm(),
        grad_stats_parallel_group=self.get_grad_stats_parallel_group(),
    )
    shards: LocalShards = self.optimizer._fsdp_shards
    shards.hand_out_grads()
    held = [local for pairs in shards.pairs for _, local in pairs if local.numel() > 0]
    clip_grad_by_total_norm_fp32(held, clip_grad, norm)
    shards.take_back_grads()
    return norm


def _save_state(original: Callable[..., Any], self: Any, is_loading: bool = False) -> Any:
    """Every rank emits the same keys: state exists for every parameter, steps or no steps."""
    if _our_chunks(self):
        config = self.model_chunks[0].config
        support.raise_problems(
            "The optimizer's state dict", support.problems(config, support.CHECKPOINT_RULES)
        )
        initialize_state(self.optimizer)
        for chunk in self.model_chunks:
            chunk.engine.show_optimizer_params()
    return original(self, is_loading)


REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    # owner, name, replacement: called with the original first
    (core_optimizer, "_get_param_groups_and_buffers", _param_groups),
    (DistributedOptimizer, "__init__", _init),
    (DistributedOptimizer, "get_grad_stats_parallel_group", _grad_stats_group),
    (DistributedOptimizer, "get_main_grads_for_grad_norm", _norm_grads),
    (DistributedOptimizer, "clip_grad_norm", _clip),
    (DistributedOptimizer, "count_zeros", _count_zeros),
    (DistributedOptimizer, "_init_optimizer_states_with_dummy_values", _init_states),
    (DistributedOptimizer, "_collect_main_grad_data_for_unscaling", _unscaling_data),
    (DistributedOptimizer, "sharded_param_state_fsdp_dtensor", _save_state),
)


def _is_ours(function: Any) -> bool:
    return hasattr(function, "_fsdp_original")


def missing() -> list[str]:
    """What `install()` replaces and this megatron-core does not have, as dotted paths."""
    return [
        f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
        for owner, name, _ in REPLACED
        if not hasattr(owner, name)
    ]


def install() -> None:
    """Puts the functions of `REPLACED` in place of core's. Idempotent."""
    for owner, name, replacement in REPLACED:
        original = getattr(owner, name)
        if _is_ours(original):
            continue

        def function(
            *args: Any, _to: Any = replacement, _from: Any = original, **kwargs: Any
        ) -> Any:
            return _to(_from, *args, **kwargs)

        functools.update_wrapper(function, original)
        function._fsdp_original = original  # type: ignore[attr-defined]
        function._fsdp_inherited = name not in vars(owner)  # type: ignore[attr-defined]
        setattr(owner, name, function)


def uninstall() -> None:
    """Puts the originals back. Optimizers that were adopted stay so."""
    for owner, name, _ in REPLACED:
        function = vars(owner).get(name)
        if not _is_ours(function):
            continue
        if function._fsdp_inherited:  # type: ignore[union-attr]
            delattr(owner, name)
        else:
            setattr(owner, name, function._fsdp_original)  # type: ignore[union-attr]
