"""The calls of `fully_shard` that are refused, and where `shard_placement_fn` places parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..core.engine.partition import managed_params
from ..core.engine.tensor_parallel import problem_of
from ..core.problems import raise_problems
from ..plan.module_problems import TRAINED_DTYPES, module_problems
from . import extended
from .call_options import SINCE_TORCH_2_15, FullyShardOptions
from .fsdp2_model import (
    SUBJECT,
    WITHIN,
    OwnPlaces,
    known_params,
    mark_of,
    marked,
    params_to_shard,
)
from .mesh import left_out_of
from .sharded_params import waits_for_run


def check_call(
    module: nn.Module,
    placement_of: Callable[[nn.Parameter], Any] | None,
    options: FullyShardOptions,
    placed: OwnPlaces,
) -> None:
    """Adds to `placed`. ValueError for a module that `fully_shard` cannot be called with, or cannot
    shard."""
    found = [f"module={type(module).__name__}: {text}" for text in _problems_of_call(module)]
    if placement_of is not None:
        found += _place(module, placement_of, options, placed)
    found += _set_computed(module, options, placed)
    plain: set[str] = set()
    for entry in params_to_shard(module, options):
        param = entry.param
        own = placed.elsewhere.get(id(param), options)
        computed = placed.computed.get(id(param), options.policy.param_dtype)
        problem = _problem_of_grads(param)
        problem = problem or extended.problem_of(param, options.offload, computed)
        if isinstance(param, DTensor):
            problem = problem or problem_of(param, own.mesh, own.whole)
        elif own.whole is not None and left_out_of(own.whole):
            problem = (
                f"it is no DTensor over the mesh, of which dp_mesh_dims leaves out "
                f"{left_out_of(own.whole)}, so each rank would train its own part. Make it one "
                "(distribute_module), or pass the data-parallel dims alone, as mesh['dp']"
            )
        elif not extended.is_extended(param):
            plain.update(entry.fqns)
        if problem:
            found.append(f"parameter {entry.fqns[0]} ({tuple(param.shape)}): {problem}")
    found += module_problems(
        module,
        None,
        None,
        plain.__contains__,
        may_be_frozen=True,
        trained_dtypes=(*TRAINED_DTYPES, torch.float64),
    )
    raise_problems(SUBJECT, found)


def _problems_of_call(module: nn.Module) -> Iterator[str]:
    if mark_of(module) is not None:
        yield "fully_shard was called with it before"
    has_no_forward = type(module).forward is nn.Module.forward  # type: ignore[comparison-overlap]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and has_no_forward:
        yield "it has no forward. Call fully_shard for its entries"
    models = [mark.model for _, mark in marked(module)]
    if any(model.engine is not None for model in models):
        yield ("modules in it have run already. Call fully_shard for the model before that")
    around = module.__dict__.get(WITHIN, lambda: None)()
    if around is not None and any(child is module for child in around.modules()):
        others = known_params(around).keys() - known_params(module).keys()
        if others.isdisjoint(id(entry.param) for entry in managed_params(module)):
            return
        yield (
            f"it is a part of a {type(around).__name__} that fully_shard was called with before. "
            "Call fully_shard for inner modules first"
        )


def _problem_of_grads(param: nn.Parameter) -> str:
    """The reason why gradients cannot have the dtype that a program has set, and what to do; empty
    if it has set none."""
    if not SINCE_TORCH_2_15 or not param.requires_grad:
        return ""
    wanted = param.grad_dtype  # type: ignore[attr-defined]
    if wanted == param.dtype:
        return ""
    return (
        f"its grad_dtype={wanted} is not supported: gradients have the parameter's own dtype. "
        "Leave grad_dtype unset, or use torch's fully_shard for this model"
    )


def _set_computed(
    module: nn.Module, options: FullyShardOptions, placed: OwnPlaces
) -> Iterator[str]:
    """Adds parameters to `placed` as the policy's `param_dtype_override_fn` (torch 2.15) returns.
    Yields problems."""
    override = getattr(options.policy, "param_dtype_override_fn", None)
    if override is None:
        return
    for entry in params_to_shard(module, options):
        param = entry.param
        returned = override(param)
        if returned not in (None, options.policy.param_dtype, param.dtype):
            yield (
                f"parameter {entry.fqns[0]} ({tuple(param.shape)}): param_dtype_override_fn "
                f"returned {returned!r}. Return None, its own dtype {param.dtype}, or "
                f"param_dtype={options.policy.param_dtype}"
            )
        elif returned is not None:
            placed.computed[id(param)] = returned


def _place(
    module: nn.Module,
    placement_of: Callable[[nn.Parameter], Any],
    options: FullyShardOptions,
    placed: OwnPlaces,
) -> Iterator[str]:
    """Adds parameters to `placed` as `placement_of` returns. Yields problems.

    It returns None, torch's Shard, or torch's `ShardPlacementResult`, which has a Shard and a mesh.
    """
    others: dict[object, FullyShardOptions] = {}
    for entry in params_to_shard(module, options):
        param = entry.param
        returned = placement_of(param)
        own = options
        info = getattr(returned, "mesh_info", None)
        if info is not None:
            own = options.over(info)
            ranks = tuple(map(dist.get_process_group_ranks, filter(None, own.groups)))
            own = others.setdefault(str(ranks), own)
            placed.elsewhere[id(param)] = own
        given = getattr(getattr(returned, "placement", returned), "dim", 0)
        problem = _problem_of_dim(param, given, own)
        if problem:
            yield (
                f"shard_placement_fn returned Shard({given}) for parameter {entry.fqns[0]}, "
                f"{problem}"
            )
        elif given % max(param.ndim, 1):
            placed.dims[id(param)] = given % param.ndim


def _problem_of_dim(param: Any, given: int, options: FullyShardOptions) -> str:
    """The reason why a parameter cannot be split along the dim `given`, and what to do; empty if it
    can."""
    dims = max(param.ndim, 1)  # a scalar is one row
    if not -dims <= given < dims:
        return f"which has {param.ndim} dims. Return one of these, or None"
    dim = given % dims
    if dim == 0:
        return ""
    if extended.is_extended(param) or waits_for_run(param):
        return f"whose class {type(param).__name__} is split by rows only. Return Shard(0), or None"
    local = param._local_tensor if isinstance(param, DTensor) else param
    size = dist.get_world_size(options.groups[0])
    if local.shape[dim] % size:
        return (
            f"which has {local.shape[dim]} elements along it: {size} ranks cannot have equal "
            "parts. Return Shard(0), or a dim that the ranks divide"
        )
    return ""
