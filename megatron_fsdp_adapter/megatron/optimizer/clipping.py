"""Core's gradient norm, count of zeros and clipping, on local tensors; the clip where the
optimizer's step reads gradients anyway, if it can be there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    get_grad_norm_fp32,
)
from megatron.core.transformer.module import param_is_not_shared

from ...core.engine.engine import FsdpEngine
from ...core.engine.params import ParamPair
from ...core.topology import TP_DIM
from ...optim.local_shards import Clip, LocalPair, LocalShards
from ...state.module_weights import ModuleWeight
from ..compat import core_api
from ..compat.patches import Original
from ..inner_module import ModelChunks, for_ours, our_chunks, ours_among

EPS = 1e-6
"""The number that core adds to a norm before it divides by it."""


# Which elements are counted, and over which ranks.


def grad_stats_group(original: Original, self: Any) -> Any:
    """The ranks over which each gradient element is counted once."""
    ours = our_chunks(self)
    if not ours:
        return original(self)
    return _counting_ranks(ours, original(self))


def _counting_ranks(ours: ModelChunks, instance: Any) -> Any:
    """The ranks over which each element is counted once: core's, of an optimizer `instance`, or all
    of them where they split the shards again, which core does not know."""
    first = ours[0]
    groups = first.optimizer_groups
    if groups is not None and not first.engine.config.strategy.shard_main:
        # With 'no_shard' 0.18 gives its optimizer the model-parallel ranks, over which gradients
        # that one data-parallel rank counts are missing from the others' norm, and which miss
        # experts of other expert-parallel ranks.
        instance = groups["intra_dist_opt_group"]
    if not first.megatron_fsdp_dist_index.hsdp_outer_dp_shard:
        return instance
    instances = first.ddp_config.num_distributed_optimizer_instances
    counted = dist.get_world_size(instance) * instances
    world = dist.get_world_size()
    if counted != world:
        raise ValueError(
            f"outer_dp_sharding_strategy='optim': {instances} optimizer instances have {counted} "
            f"ranks of a world of {world}, but the gradient norm needs a group of "
            "the whole world. Use outer_dp_sharding_strategy='no_shard'"
        )
    return dist.group.WORLD


def _counted(engine: FsdpEngine) -> list[ParamPair]:
    """The parameters with elements that this rank counts."""
    shards_main = engine.config.strategy.shard_main
    return [pair for pair in engine.pairs if _is_counted(pair, shards_main)]


def _is_counted(pair: ParamPair, shards_main: bool) -> bool:
    """True if this rank counts the gradient of a parameter: without sharding every rank of a domain
    holds the whole gradient, and the first one counts it; what tensor-parallel ranks hold alike,
    the first of them, in the mesh of the parameter's own kind. Core of 0.16.1 takes the dense ranks
    for that of experts too, and misses some where the sizes differ. Core's mark decides whether a
    parameter is split, and this package's where core has none."""
    domain = pair.group.domain
    if not shards_main and domain.axis.rank != 0:
        return False
    param = pair.sharded
    is_split = getattr(param, "tensor_model_parallel", getattr(param, "_mcore_tp", False))
    has_tensor_axis = (domain.mesh.mesh_dim_names or (None,))[-1] == TP_DIM
    if is_split or not has_tensor_axis:
        return True
    return domain.mesh.get_local_rank(TP_DIM) == 0


@for_ours
def norm_grads(ours: ModelChunks, self: Any, grad_norm_group: str | None = None) -> Any:
    """Gradients for the norm: each element on one rank of the group that core adds up over, as
    stock DDP's shards are. 0.16.1 adds up replicated gradients as well and is off by sqrt(dp); the
    model-parallel group was rejected, as expert and dense parameters have different ones.

    Without empty shards: TE's multi-tensor kernels drop a whole list that ends in an empty
    tensor, so the norm came out too small and nothing was clipped."""
    counted = set()
    for chunk in ours:
        engine = chunk.engine
        engine.gather.updates.order_compute()  # of a step before, on the same gradients
        counted |= {id(pair.sharded) for pair in _counted(engine)}
    grads = [
        param.grad._local_tensor
        for param in self.get_parameters()
        if param.grad is not None
        and id(param) in counted
        and param_is_not_shared(param)
        and core_api.norm_group(param) == grad_norm_group
    ]
    return [grad for grad in grads if grad.numel() > 0]


def gradients(optimizer: Any, group: str | None) -> list[torch.Tensor]:
    """The gradients that a norm counts on this rank: the model's, or that of a group."""
    found = getattr(optimizer, core_api.NORM_GRADIENTS)
    if group is None:
        return found()
    return found(group)


def norm_of(optimizer: Any, group: str | None) -> Any:
    """The norm of the model's gradients (None), or of those of a group: a number, or float32 (1,)
    on the device. Collective over the optimizer's ranks."""
    return get_grad_norm_fp32(
        gradients(optimizer, group),
        grad_stats_parallel_group=optimizer.get_grad_stats_parallel_group(),
    )


@for_ours
def count_zeros(ours: ModelChunks, self: Any) -> Any:
    """Zeros among the elements that the norm counts; 0.16.1 counts replicas too."""
    shards = getattr(getattr(self, "optimizer", None), "_fsdp_shards", None)
    if shards is not None:
        shards.clip_now()  # gradients are read before the step clips them
    norm_groups = (None, *core_api.SEPARATE_NORMS)
    grads = [grad for group in norm_groups for grad in gradients(self, group)]
    zeros = torch.zeros(1, dtype=torch.float32, device=ours[0].engine.runtime.device)
    for grad in grads:
        zeros += grad.numel() - torch.count_nonzero(grad)
    dist.all_reduce(zeros, group=self.get_grad_stats_parallel_group())
    return zeros.item()


def params_norm(original: Original, model: Any, *args: Any, **kwargs: Any) -> float:
    """The norm of the main weights of the whole model. Megatron's own adds up the shards of each
    DTensor over its mesh, and misses what other pipeline stages and expert-parallel ranks have."""
    ours = ours_among(model if isinstance(model, list) else [model])
    if not ours or ours[0].optimizer_groups is None:
        return original(model, *args, **kwargs)
    squares = torch.zeros(1, dtype=torch.float32, device=ours[0].engine.runtime.device)
    for chunk in ours:
        chunk.stop_communication()
        for pair in _counted(chunk.engine):
            if param_is_not_shared(pair.sharded):
                local = ModuleWeight(pair, chunk.engine).local
                squares += torch.linalg.vector_norm(local, dtype=torch.float32).to(squares) ** 2
    instance = ours[0].optimizer_groups["intra_dist_opt_group"]
    dist.all_reduce(squares, group=_counting_ranks(ours, instance))
    return squares.item() ** 0.5


# The clip, and the step behind it.


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
        """The factor, computed as core does."""
        found = largest / (norms[None] + EPS)
        if isinstance(found, torch.Tensor):
            return found.clamp_max(1.0)
        if found >= 1.0:
            return None
        return torch.full((), found, device=device)

    if len(norms) > 1:
        return apply, None
    return apply, factor


def clip(original: Original, self: Any, clip_grad: float) -> Any:
    """Core's own norm and clipping, given local tensors: none is empty (`norm_grads`), and none
    pays DTensor dispatch. Parameters of a group with a norm of its own are clipped by it."""
    if not our_chunks(self) or self.is_stub_optimizer:
        return original(self, clip_grad)
    groups = (None, *core_api.present_norm_groups(self))
    norms = {group: norm_of(self, group) for group in groups}
    shards: LocalShards = self.optimizer._fsdp_shards
    shards.follow_groups(self.optimizer)
    shards.clip_grads(clip_by(dict(norms), clip_grad, shards.decoupled))
    self.norm_of_step = norms.pop(None)
    self.grad_norms_by_group = norms  # where a training loop of 0.19 reads them
    return self.norm_of_step


def step(original: Original, self: Any) -> Any:
    """A step returns what a step of stock DDP does, whose optimizers are in a chain: the norm
    without clipping too, and no number of zeros where none is asked for. Ours is in a chain only
    where there are several model chunks.

    Inside, gradients between clipping and the inner optimizer's step are read only by code that
    reports it. A step that is left out leaves clipped ones, as without this."""
    if not our_chunks(self) or self.is_stub_optimizer:  # a stub on every rank: all is frozen
        return original(self)
    shards: LocalShards = self.optimizer._fsdp_shards
    shards.step_follows = True
    self.in_own_step = True
    try:
        updated, norm, zeros = original(self)
    finally:
        self.in_own_step = False
        shards.clip_now()
    if norm is None:  # of gradients that are not finite
        return updated, None, None
    if not self.config.log_num_zeros_in_grad:
        zeros = None
    return updated, self.norm_of_step, zeros


def step_with_norm(original: Original, self: Any) -> bool:
    """Computes the norm that clipping has not, and leaves the step out, on all ranks, where it is
    above `grad_norm_skip_threshold`. A chain of core's optimizers does both itself."""
    if not getattr(self, "in_own_step", False):
        return original(self)
    if self.config.clip_grad <= 0.0:
        self.norm_of_step = norm_of(self, None)
    threshold = core_api.norm_threshold(self.config)
    if math.isinf(threshold):  # the norm may be on the device
        return original(self)
    if self.norm_of_step > threshold:
        return False
    return original(self)
