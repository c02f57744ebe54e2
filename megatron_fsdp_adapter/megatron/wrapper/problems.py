"""Everything that is wrong with the arguments of a wrapper's constructor, found before anything is
made of them.

Each function returns one line for each problem, so that the wrapper can raise all at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...build.materialize import meta_problems
from ...core.distributed_index import FSDPDistributedIndex
from ...core.engine.partition import ManagedParam, managed_params
from ...core.problems import raise_problems
from ...plan.module_problems import module_problems
from ...plan.placement import placement_problems
from ...quantized import format_of
from ..compat import core_api
from ..compat.core_support import require_supported_core
from ..layers.fused_wgrad import asks_fusion, fuses
from ..options import capability, validation
from ..options.rules import is_on
from ..options.settings import FP8_PARAM, FP8_PARAM_GATHER
from ..options.table import GATHER_PARTS, MAIN_PARAMS, read
from .arguments import Arguments
from .domains import read_index
from .process_groups import group_named, has_groups

Ranks = Mapping[str, tuple[int, ...]]
"""Global ranks of this rank's groups, by their names in ProcessGroupCollection."""

SIZES: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size", "ep": "expert_model_parallel_size",
    "expt_tp": "expert_tensor_parallel_size",
}  # fmt: skip
"""A group -> the field of the model config with its size."""
CHECKED = (*SIZES, "dp_cp", "expt_dp")
ONLY_WITH_EXPERTS = ("expt_tp", "expt_dp")

CROSSING: tuple[tuple[str, str], ...] = (
    ("tp", "dp_cp"), ("pp", "dp_cp"), ("tp", "pp"),
    ("ep", "expt_dp"), ("expt_tp", "expt_dp"), ("pp", "expt_dp"), ("ep", "expt_tp"),
)  # fmt: skip
"""Groups along different axes of one grid: a rank's two groups share only that rank."""

EXPERTS_IN_ONE_TENSOR = ("GroupedMLP",)
"""Classes of core, by name. Core takes this one for `moe_grouped_gemm` wherever it has no layers of
Transformer Engine, so the option that asks for it is no evidence."""


def checked_index(given: Arguments) -> FSDPDistributedIndex:
    """The index over the process groups. Collective where the wrapper makes groups.

    Raises:
        RuntimeError: this megatron-core is not supported.
        ValueError: with everything that is wrong with the arguments.
    """
    require_supported_core()
    config, ddp_config, module = given.config, given.ddp_config, given.module
    found = [
        *validation.wrapper_problems(
            config, ddp_config, given.device, core_api.asks_tokens_on_the_host()
        ),
        *capability.device_problems(config, given.device),
        *module_problems(
            module, given.unit_classes, given.given_device,
            read(ddp_config, MAIN_PARAMS), given.manages,
            may_be_frozen=config.pipeline_model_parallel_size > 1,  # of a stage
        ),
        *model_problems(module, config, ddp_config),
        *meta_problems(module, config.init_model_with_meta_device, given.initializer_of),
        *placement_problems(given.module_placements, module),
        *group_problems(config, group_ranks(given.pg_collection)),
    ]  # fmt: skip
    index, of_groups = read_index(module, config, ddp_config, given.device, given.pg_collection)
    raise_problems("FullyShardedDataParallel", found + of_groups)
    assert index is not None  # or there were problems
    return index


def group_ranks(pg_collection: Any | None) -> Ranks:
    """The ranks of the groups that exist, in the collection or in `parallel_state`."""
    names = CHECKED if has_groups(pg_collection) else ()
    groups = {name: group_named(pg_collection, name) for name in names}
    return {
        name: tuple(dist.get_process_group_ranks(group))
        for name, group in groups.items()
        if isinstance(group, dist.ProcessGroup)
    }


def group_problems(config: Any, ranks: Ranks) -> list[str]:
    """Groups that contradict the model config, or are not of one grid of ranks. Without these
    checks training would run with different weights on ranks of other axes."""
    with_experts = bool(getattr(config, "num_moe_experts", None))
    used = {
        name: found for name, found in ranks.items()
        if with_experts or name not in ONLY_WITH_EXPERTS
    }  # fmt: skip
    return [
        *_sizes_unlike_config(config, used),
        *_overlapping(used),
        *_outside_data_parallel(used),
        *(_unlike_dense_ranks(used) if with_experts else ()),
    ]


def _sizes_unlike_config(config: Any, ranks: Ranks) -> list[str]:
    return [
        f"{option}={getattr(config, option, 1)}, but the {name} process group has "
        f"{len(ranks[name])} ranks {list(ranks[name])}. Initialize the groups with the sizes of "
        "the model config"
        for name, option in SIZES.items()
        if name in ranks and len(ranks[name]) != getattr(config, option, 1)
    ]


def _overlapping(ranks: Ranks) -> list[str]:
    me = dist.get_rank()
    return [
        f"process groups {first}={list(ranks[first])} and {second}={list(ranks[second])} share "
        f"ranks {sorted(set(ranks[first]) & set(ranks[second]))}, expected [{me}]. Make the "
        "groups of one grid of ranks, each along a different axis"
        for first, second in CROSSING
        if first in ranks and second in ranks and set(ranks[first]) & set(ranks[second]) - {me}
    ]


def _outside_data_parallel(ranks: Ranks) -> list[str]:
    outside = sorted(set(ranks.get("cp", ())) - set(ranks.get("dp_cp", ranks.get("cp", ()))))
    if not outside:
        return []
    return [
        f"process group dp_cp={list(ranks['dp_cp'])} lacks the ranks {outside} of "
        f"cp={list(ranks['cp'])}, but weights are sharded over data- and context-parallel ranks. "
        "Pass the group of both as dp_cp"
    ]


def _unlike_dense_ranks(ranks: Ranks) -> list[str]:
    """A problem if tp x dp_cp and expt_tp x ep x expt_dp differ: both are the ranks of a pipeline
    stage."""
    dense, of_experts = ("tp", "dp_cp"), ("expt_tp", "ep", "expt_dp")
    if not all(name in ranks for name in (*dense, *of_experts)):
        return []
    totals = [math.prod(len(ranks[name]) for name in names) for names in (dense, of_experts)]
    if totals[0] == totals[1]:
        return []
    sizes = {name: list(ranks[name]) for name in (*dense, *of_experts)}
    return [
        f"process groups {sizes}: tp x dp_cp has {totals[0]} ranks, but expt_tp x ep x expt_dp "
        f"has {totals[1]}. Set expert_model_parallel_size and expert_tensor_parallel_size so that "
        "their product divides the number of ranks"
    ]


def model_problems(module: nn.Module, config: Any, ddp_config: Any) -> list[str]:
    """Problems of `module`, whose model config is `config`."""
    return [
        *_compiled(module),
        *_formats_that_do_not_fit(module, config, ddp_config),
        *_experts_in_one_tensor(module),
        *_experts_marked_as_dense(module, config),
        *_parts_that_return_biases(config, ddp_config),
        *_hooks_that_get_nothing(module, asks_fusion(config)),
    ]


def _compiled(module: nn.Module) -> list[str]:
    """Modules that are compiled, by the function or the method."""
    return [
        f"module {name or type(child).__name__}: compiled modules are not tested with Megatron's "
        "layers, pipelines and fused weight gradients. Wrap the original module, and compile "
        "functions inside the layers"
        for name, child in module.named_modules()
        if isinstance(child, torch._dynamo.OptimizedModule) or child._compiled_call_impl is not None
    ][:1]


def _formats_that_do_not_fit(module: nn.Module, config: Any, ddp_config: Any) -> list[str]:
    """Weights in formats that are not supported, or in none where gathers of them are asked for. A
    pipeline stage may have layers in bf16 alone, so the model config counts too."""
    try:
        quantized = [one.fqns[0] for one in managed_params(module) if format_of(one) is not None]
    except (ValueError, NotImplementedError) as error:
        return [str(error)]
    if not is_on(ddp_config, FP8_PARAM_GATHER) or is_on(config, FP8_PARAM) or quantized:
        return []
    return [
        f"{FP8_PARAM_GATHER}=True: this model's weights are not quantized, because it was made "
        f"with {FP8_PARAM}=False. Make the model with {FP8_PARAM}=True, which sets this too, or "
        "set it to False"
    ]


def _experts_in_one_tensor(module: nn.Module) -> list[str]:
    found = [
        name
        for name, child in module.named_modules()
        if any(cls.__name__ in EXPERTS_IN_ONE_TENSOR for cls in type(child).__mro__)
    ]
    if not found:
        return []
    return [
        f"module {found[0]} (and {len(found) - 1} more): all experts of this rank are one tensor, "
        "which a checkpoint cannot distinguish from another rank's. Use Transformer Engine's "
        "grouped layers, or set moe_grouped_gemm=False"
    ]


def _experts_marked_as_dense(module: nn.Module, config: Any) -> list[str]:
    """Up to 0.18 core marks the weights of experts (`allreduce=False`) by the expert-parallel size
    alone, and later by the tensor-parallel sizes too."""
    sizes = [
        getattr(config, f"{name}_parallel_size", None)
        for name in ("expert_tensor", "tensor_model", "expert_model")
    ]
    if not getattr(config, "num_moe_experts", None) or sizes[0] == sizes[1]:
        return []
    found = [
        name
        for name, param in module.named_parameters()
        if ".experts." in f".{name}" and getattr(param, "allreduce", False)
    ]
    if not found:
        return []
    return [
        f"expert_tensor_parallel_size={sizes[0]} with tensor_model_parallel_size={sizes[1]} and "
        f"expert_model_parallel_size={sizes[2]}: core has marked {found[0]} (and {len(found) - 1} "
        "more) as dense weights, whose gradients would be reduced over the wrong ranks. Make "
        "both tensor-parallel sizes equal, or expert_model_parallel_size larger than 1, or use "
        "megatron-core 0.19"
    ]


def _parts_that_return_biases(config: Any, ddp_config: Any) -> list[str]:
    """A bias that a unit returns is read when the unit is resharded."""
    if not is_on(ddp_config, GATHER_PARTS) or not getattr(config, "num_moe_experts", None):
        return []
    if not getattr(config, "add_bias_linear", False):
        return []
    return [
        f"{GATHER_PARTS}=True with add_bias_linear=True: linear layers of experts return their "
        "biases, which are resharded before core adds them. Set either to False"
    ]


def _hooks_that_get_nothing(module: nn.Module, fused: bool) -> list[str]:
    """Problems of gradient hooks on parameters whose module writes the gradient by itself, so that
    autograd has none to call hooks with: they would get None, or not run. Running them on the
    bucket was rejected: what they return takes the place of the gradient, which is on its way by
    then."""
    return [
        f"parameter {managed.fqns[0]}: it has a gradient hook, and with "
        "gradient_accumulation_fusion=True its module writes the gradient without autograd, so "
        "the hook would receive None. Set gradient_accumulation_fusion=False, or remove the hook"
        for managed in managed_params(module)
        if (managed.param._backward_hooks or managed.param._post_accumulate_grad_hooks)
        and fused
        and _is_written_by_a_module(managed)
    ]


def _is_written_by_a_module(managed: ManagedParam) -> bool:
    """A tied weight too: it is handed to the output layer, which marks it."""
    param = managed.param
    by_holder = any(fuses(owner) for owner, _ in managed.slots)
    return param.ndim == 2 and (by_holder or bool(getattr(param, "zero_out_wgrad", False)))
