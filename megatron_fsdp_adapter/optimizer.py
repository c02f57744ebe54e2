"""The seam to Megatron's optimizer: the one place that adapts it, while no file of it is edited.

`install()` replaces a few methods of core's `DistributedOptimizer` by versions that act only when
the model chunks are ours, and hand over to the original otherwise. The inner optimizer (torch
AdamW, TE or apex FusedAdam) is made to step on local tensors (`local_optimizer.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import muon as core_muon
from megatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    get_grad_norm_fp32,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import param_is_not_shared

from . import optimizer_state, support
from .local_optimizer import LocalShards, adopt, initialize_state
from .placement import replicated_name
from .topology import TP_DIM

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
            [
                *support.problems(config, support.OPTIMIZER_CONFIG_RULES),
                *_precision_problems(config, _ours(model_chunks)),
            ],
        )
        _use_distributed_optimizer(config)
    return original(model_chunks, *args, **kwargs)


def _use_distributed_optimizer(config: Any) -> None:
    """Sets the option in an optimizer config that lacks it, and says so. Without it core would make
    an optimizer that steps on DTensors and never tells the wrapper that weights have changed."""
    if config.use_distributed_optimizer:
        return
    config.use_distributed_optimizer = True
    if dist.get_rank() == 0:
        print(
            "Megatron's optimizer with FullyShardedDataParallel: set for you: "
            "use_distributed_optimizer=True",
            flush=True,
        )


def _precision_problems(config: Any, chunks: Sequence[Any]) -> list[str]:
    """What the wrapper's dtypes and the optimizer's options have against each other."""
    policy = chunks[0].engine.config.policy
    trained = [g for chunk in chunks for g in chunk.engine.groups if g.key.requires_grad]
    dtypes = {policy.grads_dtype, *(group.main_dtype for group in trained)}
    if not config.use_precision_aware_optimizer:
        return [] if dtypes == {torch.float32} else [
            f"use_precision_aware_optimizer=False: main weights and gradients are in "
            f"{sorted(map(str, dtypes))}, and Adam without it takes float32 alone; set it to True "
            "(needs Transformer Engine), or leave megatron_fsdp_main_params_dtype and "
            "megatron_fsdp_main_grads_dtype unset"
        ]
    found = [
        f"{option}={chosen}: {other} of the DDP config says {said}; set them alike, or leave "
        f"{option} at torch.float32"
        for option, other, chosen, said in (
            ("main_grads_dtype", "megatron_fsdp_main_grads_dtype", config.main_grads_dtype,
             policy.grads_dtype),
            ("main_params_dtype", "megatron_fsdp_main_params_dtype", config.main_params_dtype,
             policy.main_params_dtype),
        )
        if chosen not in (torch.float32, said)
    ]  # fmt: skip
    if core_optimizer.USING_PYTORCH_OPTIMIZER:
        found.append(
            "use_precision_aware_optimizer=True: it is Transformer Engine's FusedAdam, which "
            "cannot be imported here; install Transformer Engine, or set it to False"
        )
    return found


def _refuse_whole_matrices(
    original: Callable[..., Any], model_chunks: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Core's Muon asks for parameter groups by a name of its own, and would be made on shards."""
    if _ours(model_chunks):
        raise ValueError(
            "optimizer='muon' with FullyShardedDataParallel: Muon needs whole matrices, and "
            "weights are sharded; use 'adam', by get_megatron_optimizer"
        )
    return original(model_chunks, *args, **kwargs)


def _refuse_offload(original: Callable[..., None], self: Any) -> None:
    if _our_chunks(self):
        raise RuntimeError(
            f"{original.__name__}() of Megatron's optimizer with FullyShardedDataParallel: main "
            "weights are views of flat buffers, which a copy elsewhere leaves behind; delete the "
            "wrapper and load a checkpoint, or keep them where they are"
        )
    original(self)


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


def _tensor_parallel_rank(mesh: Any) -> int:
    """In the mesh of a parameter's own kind: of experts, another than of dense layers."""
    names = mesh.mesh_dim_names or ()
    return mesh.get_local_rank(TP_DIM) if names and names[-1] == TP_DIM else 0


def _is_split(param: Any) -> bool:
    """Over tensor-parallel ranks: by core's mark, and where there is none by ours."""
    return bool(getattr(param, "tensor_model_parallel", getattr(param, "_mcore_tp", False)))


def _replicas(chunks: Sequence[Any]) -> set[int]:
    """Ids of the optimizer parameters whose gradient another rank counts: without sharding, or in
    a replicated module, every rank of a domain holds the whole gradient, and the first rank of the
    shards of its kind counts it; what tensor-parallel ranks hold alike, the first of them. Core of
    0.16.1 takes the dense ranks for that of experts too, and misses some where the sizes differ."""
    found = set()
    for chunk in chunks:
        sharded = chunk.megatron_fsdp_dist_index.domains
        kinds = {replicated_name(kind): kind for kind in sharded}
        for pair in chunk.engine.pairs:
            kind = kinds.get(pair.group.key.domain)
            domain = pair.group.domain if kind is None else sharded[kind]
            is_whole = kind is not None or not chunk.engine.config.strategy.shard_main
            is_duplicate = not _is_split(pair.optimizer) and _tensor_parallel_rank(domain.mesh) != 0
            if is_duplicate or (is_whole and domain.axis.rank != 0):
                found.add(id(pair.optimizer))
    return found


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
    grads = [
        param.grad._local_tensor
        for param in self.get_parameters()
        if param.grad is not None
        and id(param) not in elsewhere
        and param_is_not_shared(param)
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
    clip_grad_by_total_norm_fp32(held, clip_grad, norm, use_decoupled_grad=shards.decoupled)
    shards.take_back_grads()
    return norm


def _param_name(original: Callable[..., str], self: Any, param: Any) -> str:
    """Names of the whole model; 0.16.1 numbers layers from the stage's first, and fails where two
    model chunks of a rank have the same names."""
    ours = _our_chunks(self)
    if not ours:
        return original(self, param)
    if not hasattr(self, "param_to_name"):
        self.param_to_name = optimizer_state.parameter_names(ours)
        self.halved_names = optimizer_state.halved_names(ours)
    return self.param_to_name[param]


def _params_by_name(self: Any) -> dict[str, Any]:
    params = [param for group in self.optimizer.param_groups for param in group["params"]]
    return {self._param_name(param): param for param in params}


def _sharded_state(
    original: Callable[..., Any], self: Any, *args: Any, metadata: Any = None, **kwargs: Any
) -> Any:
    """In the one form that there is for sharded weights. Megatron-LM names it only if its argument
    `use_distributed_optimizer` is set, which a script that wraps the model itself may leave out."""
    if _our_chunks(self):
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor", **(metadata or {})}
    return original(self, *args, metadata=metadata, **kwargs)


def _save_state(original: Callable[..., Any], self: Any, is_loading: bool = False) -> Any:
    """Every rank emits the same keys for the same parameters: state exists for each of them, steps
    or no steps."""
    if not _our_chunks(self):
        return original(self, is_loading)
    initialize_state(self.optimizer)
    for chunk in self.model_chunks:
        chunk.engine.show_optimizer_params()
    params = _params_by_name(self)
    state = original(self, is_loading)
    cut = optimizer_state.in_pieces(state[optimizer_state.STATE], params, self.halved_names)
    return {**state, optimizer_state.STATE: cut}


def _load_state(original: Callable[..., None], self: Any, state_dict: dict[str, Any]) -> None:
    """What `_save_state` gave, or a load of it, with values sharded as they are here."""
    if not _our_chunks(self) or optimizer_state.META not in state_dict:
        original(self, state_dict)
        return
    initialize_state(self.optimizer)
    params = _params_by_name(self)
    own = {name: self.optimizer.state[param] for name, param in params.items()}
    state = optimizer_state.joined(
        state_dict[optimizer_state.STATE], own, params, self.halved_names
    )
    meta = optimizer_state.with_own_split(
        state_dict[optimizer_state.META], self.optimizer.param_groups, self.param_to_name
    )
    original(self, {optimizer_state.STATE: state, optimizer_state.META: meta})


REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    # owner, name, replacement: called with the original first
    (core_optimizer, "_get_param_groups_and_buffers", _param_groups),
    (core_muon, "_get_param_groups", _refuse_whole_matrices),
    (DistributedOptimizer, "offload_to_cpu", _refuse_offload),
    (DistributedOptimizer, "restore_from_cpu", _refuse_offload),
    (DistributedOptimizer, "__init__", _init),
    (DistributedOptimizer, "get_grad_stats_parallel_group", _grad_stats_group),
    (DistributedOptimizer, "get_main_grads_for_grad_norm", _norm_grads),
    (DistributedOptimizer, "clip_grad_norm", _clip),
    (DistributedOptimizer, "count_zeros", _count_zeros),
    (DistributedOptimizer, "_init_optimizer_states_with_dummy_values", _init_states),
    (DistributedOptimizer, "_collect_main_grad_data_for_unscaling", _unscaling_data),
    (DistributedOptimizer, "_param_name", _param_name),
    (DistributedOptimizer, "sharded_state_dict", _sharded_state),
    (DistributedOptimizer, "sharded_param_state_fsdp_dtensor", _save_state),
    (DistributedOptimizer, "load_state_dict", _load_state),
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
