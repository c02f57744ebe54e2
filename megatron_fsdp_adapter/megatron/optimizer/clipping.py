"""Core's gradient norm, count of zeros and clipping, on local tensors.

Where possible gradients are not clipped at once: the optimizer's step multiplies them when it reads
them anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    get_grad_norm_fp32,
)
from megatron.core.transformer.module import param_is_not_shared

from ...core.distributed_index import FSDPDistributedIndex
from ...core.engine.params import ParamPair
from ...core.topology import TP_DIM
from ...optim.local_shards import LocalPair, LocalShards
from ...state.module_weights import ModuleWeight
from ..compat import core_api
from ..compat.patches import Original
from ..inner_module import ModelChunks, for_ours, our_chunks, ours_among
from ..options.table import INSTANCES, OUTER

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
    """The ranks over which each gradient element is counted once.

    These are core's ranks of one optimizer `instance`, if each instance counts all elements
    (`_counts_in_each_instance`), or if there is one. Otherwise they are all ranks: core knows
    neither instances that split the shards again, nor replicas of experts of their own. ValueError
    if the instances are not the whole world then."""
    first = ours[0]
    groups = first.optimizer_groups
    if groups is not None and not first.engine.config.strategy.shard_main:
        # With 'no_shard' core of 0.18 adds up over the model-parallel ranks. These do not contain
        # the one data-parallel rank that counts an element, nor the other experts' ranks.
        instance = groups["intra_dist_opt_group"]
    instances = getattr(first.ddp_config, INSTANCES)
    if instances == 1 or _counts_in_each_instance(first):
        return instance
    counted = dist.get_world_size(instance) * instances
    world = dist.get_world_size()
    if counted != world:
        raise ValueError(
            f"{INSTANCES}={instances}: the gradient norm needs a group of the whole world of "
            f"{world} ranks, but the optimizer instances have {counted}. Use {OUTER}='no_shard' "
            "and the same number of instances for experts"
        )
    return dist.group.WORLD


def _counts_in_each_instance(chunk: Any) -> bool:
    """True if each of several optimizer instances counts all elements, as it has them all."""
    index: FSDPDistributedIndex = chunk.megatron_fsdp_dist_index
    return getattr(chunk.ddp_config, INSTANCES) > 1 and index.repeats_alike


def _counted(chunk: Any) -> list[ParamPair]:
    """The parameters of a model chunk with elements that this rank counts."""
    first_only = not _counts_in_each_instance(chunk)
    return [pair for pair in chunk.engine.pairs if _is_counted(pair, first_only)]


def _is_counted(pair: ParamPair, first_only: bool) -> bool:
    """True if this rank counts the gradient of a parameter.

    - first_only: of equal shards on an outer axis the first one is counted.
    - Without sharding every rank of a domain holds the whole gradient. The first one counts it.
    - Where tensor-parallel ranks hold the same gradient, the first of them counts it. The ranks are
      those of the parameter's own mesh: core of 0.16.1 takes the dense ranks for experts too, and
      misses some gradients where the sizes differ.

    Core's mark tells if tensor parallelism splits the parameter, or this package's if there is
    none."""
    domain = pair.group.domain
    if not pair.group.shards.splits_axis and domain.axis.rank != 0:
        return False
    outer = domain.outer
    if first_only and outer is not None and not pair.group.shards.splits_outer and outer.rank != 0:
        return False
    param = pair.sharded
    is_split = getattr(param, "tensor_model_parallel", getattr(param, "_mcore_tp", False))
    has_tensor_axis = (domain.mesh.mesh_dim_names or (None,))[-1] == TP_DIM
    if is_split or not has_tensor_axis:
        return True
    return domain.mesh.get_local_rank(TP_DIM) == 0


@for_ours
def norm_grads(ours: ModelChunks, self: Any, grad_norm_group: str | None = None) -> Any:
    """The gradients that this rank adds to the norm of the group: local tensors, none empty.

    Each element is on one rank of those that core adds up over, as with stock DDP's shards. Core of
    0.16.1 adds up replicated gradients as well, so its norm is too large by sqrt(dp). Adding up
    over the model-parallel ranks was rejected: those of expert and dense parameters differ.

    Empty shards are left out because TE's multi-tensor kernels drop a whole list that ends in an
    empty tensor: the norm would be too small, and nothing would be clipped."""
    counted = set()
    for chunk in ours:
        engine = chunk.engine
        engine.gather.updates.order_compute()  # behind updates of an earlier step
        counted |= {id(pair.sharded) for pair in _counted(chunk)}
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
    """The gradients that this rank adds to the norm of a group; None for the model's norm."""
    norm_gradients = getattr(optimizer, core_api.NORM_GRADIENTS)
    if group is None:  # releases without groups have no such parameter
        return norm_gradients()
    return norm_gradients(group)


def norm_of(optimizer: Any, group: str | None) -> Any:
    """The gradient norm of a group; None for the model's norm. The result is a number, or a float32
    tensor of shape (1,) on the device. Collective over the optimizer's ranks."""
    return get_grad_norm_fp32(
        gradients(optimizer, group),
        grad_stats_parallel_group=optimizer.get_grad_stats_parallel_group(),
    )


@for_ours
def count_zeros(ours: ModelChunks, self: Any) -> Any:
    """Number of zeros among the elements that the norms count; core of 0.16.1 counts replicas too.
    Collective over the optimizer's ranks."""
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
    """The norm of the main weights of the whole model. Collective.

    Megatron's own function adds up the shards of each DTensor over its mesh: it misses the weights
    of other pipeline stages and expert-parallel ranks."""
    ours = ours_among(model if isinstance(model, list) else [model])
    if not ours or ours[0].optimizer_groups is None:
        return original(model, *args, **kwargs)
    squares = torch.zeros(1, dtype=torch.float32, device=ours[0].engine.runtime.device)
    for chunk in ours:
        chunk.stop_communication()
        for pair in _counted(chunk):
            if param_is_not_shared(pair.sharded):
                local = ModuleWeight(pair, chunk.engine).local
                squares += torch.linalg.vector_norm(local, dtype=torch.float32).to(squares) ** 2
    instance = ours[0].optimizer_groups["intra_dist_opt_group"]
    dist.all_reduce(squares, group=_counting_ranks(ours, instance))
    return squares.item() ** 0.5


# Clipping, and the step after it.


@dataclass(frozen=True)
class ClipToNorm:
    """A clip of gradients to a norm, by core's own function (`local_shards.Clip`)."""

    # By group of parameters, None for the model: its norm, a number or a tensor on the device.
    norms: Mapping[str | None, Any]
    # The norm that they are clipped to.
    largest: float
    # Whether gradients are in `decoupled_grad`, where FusedAdam reads those of other dtypes.
    decoupled: bool

    @property
    def has_one_factor(self) -> bool:
        """True if no group has a norm of its own."""
        return len(self.norms) == 1

    def factor(self, device: torch.device) -> torch.Tensor | None:
        """The number that multiplies all gradients, computed as core does; None for 1."""
        ratio = self.largest / (self.norms[None] + EPS)
        if isinstance(ratio, torch.Tensor):
            return ratio.clamp_max(1.0)
        if ratio >= 1.0:
            return None
        return torch.full((), ratio, dtype=torch.float32, device=device)

    def apply(self, pairs: Sequence[LocalPair]) -> None:
        """Clips the gradients of each group by its own norm."""
        for group, norm in self.norms.items():
            clipped = [
                local
                for param, local in pairs
                if local.numel() > 0 and core_api.norm_group(param) == group
            ]
            if clipped:
                clip_grad_by_total_norm_fp32(
                    clipped, self.largest, norm, use_decoupled_grad=self.decoupled
                )


def clip(original: Original, self: Any, clip_grad: float) -> Any:
    """Computes the gradient norms and has gradients clipped, now or in the step that called this;
    returns the model's norm.

    Norm and clipping are core's own functions on local tensors. Parameters of a group with a norm
    of its own are clipped by that norm."""
    if not our_chunks(self) or self.is_stub_optimizer:
        return original(self, clip_grad)
    groups = (None, *core_api.present_norm_groups(self))
    norms = {group: norm_of(self, group) for group in groups}
    shards: LocalShards = self.optimizer._fsdp_shards
    shards.follow_groups(self.optimizer)
    to_norm = ClipToNorm(dict(norms), clip_grad, shards.decoupled)
    shards.clip_grads(to_norm, step_follows=getattr(self, "in_own_step", False))
    self.norm_of_step = norms.pop(None)
    self.grad_norms_by_group = norms  # where a training loop of 0.19 reads them
    return self.norm_of_step


def step(original: Original, self: Any) -> Any:
    """A step that returns what it returns under stock DDP: whether weights were updated, the norm
    also without clipping, and the number of zeros, or None if it is not asked for.

    Stock DDP's optimizers are in a chain, which returns these. Ours is in a chain only if there are
    several model chunks.

    In this step (`in_own_step`) the clip may wait until the inner optimizer reads the gradients.
    Code that reads them earlier calls `clip_now` first, as `count_zeros` does. `clip_now` at the
    end is for a step that was left out: gradients are clipped then too."""
    # An optimizer is a stub if every parameter is frozen, on every rank.
    if not our_chunks(self) or self.is_stub_optimizer:
        return original(self)
    shards: LocalShards = self.optimizer._fsdp_shards
    self.in_own_step = True
    try:
        updated, norm, zeros = original(self)
    finally:
        self.in_own_step = False
        shards.clip_now()
    if norm is None:  # gradients are not finite
        return updated, None, None
    if not self.config.log_num_zeros_in_grad:
        zeros = None
    return updated, self.norm_of_step, zeros


def step_with_norm(original: Original, self: Any) -> bool:
    """Takes the step, unless the norm is above `grad_norm_skip_threshold`; returns whether it did.

    Without clipping the norm is computed here. All ranks have the same norm and decide alike. A
    chain of core's optimizers does both itself: it does not call `step`, which sets
    `in_own_step`."""
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
