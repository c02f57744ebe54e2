"""Checks of the arguments of a wrapper's constructor, before anything is made of them.

Each function returns one line for each problem, so that the wrapper can raise all at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...build.materialize import meta_problems
from ...core.distributed_index import FSDPDistributedIndex
from ...core.engine.partition import ManagedParam, managed_params
from ...core.problems import raise_problems
from ...plan.module_problems import module_problems, place_problems
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

RanksOfGroups = Mapping[str, tuple[int, ...]]
"""Global ranks in each of this rank's groups, by the group's name in ProcessGroupCollection."""

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
"""Pairs of groups along different axes of one grid: a rank's two groups share only that rank."""

EXPERTS_IN_ONE_TENSOR = ("GroupedMLP",)
"""Classes of core, by name, with all experts in one tensor. Only a module's class can tell: with
`moe_grouped_gemm` core takes this class only where it has no layers of Transformer Engine."""


def checked_index(given: Arguments) -> FSDPDistributedIndex:
    """The index over the process groups. Collective where the wrapper makes groups.

    Raises:
        RuntimeError: this megatron-core is not supported.
        ValueError: with all problems of the arguments.
    """
    require_supported_core()
    config = given.config
    ddp_config = given.ddp_config
    module = given.module
    asks_tokens = core_api.asks_tokens_on_the_host()
    found = [
        *validation.wrapper_problems(config, ddp_config, given.device, asks_tokens),
        *capability.device_problems(config, given.device),
        *module_problems(
            module,
            given.unit_classes,
            read(ddp_config, MAIN_PARAMS),
            given.manages,
            may_be_frozen=config.pipeline_model_parallel_size > 1,  # other stages may train
        ),
        *place_problems(module, given.given_device),
        *model_problems(module, config, ddp_config),
        *meta_problems(module, config.init_model_with_meta_device, given.initializer_of),
        *placement_problems(given.module_placements, module),
        *group_problems(config, group_ranks(given.pg_collection)),
    ]
    index, of_groups = read_index(module, config, ddp_config, given.device, given.pg_collection)
    raise_problems("FullyShardedDataParallel", found + of_groups)
    assert index is not None  # or there were problems
    return index


def group_ranks(pg_collection: Any | None) -> RanksOfGroups:
    """The ranks of those groups of `CHECKED` that exist, in the collection or `parallel_state`."""
    if not has_groups(pg_collection):
        return {}
    ranks = {}
    for name in CHECKED:
        group = group_named(pg_collection, name)
        if isinstance(group, dist.ProcessGroup):
            ranks[name] = tuple(dist.get_process_group_ranks(group))
    return ranks


def group_problems(config: Any, ranks: RanksOfGroups) -> list[str]:
    """Problems of groups that contradict the model config, or are not of one grid of ranks. With
    such groups training would run, with different weights on ranks that should have the same."""
    if not is_on(config, "num_moe_experts"):
        ranks = {name: found for name, found in ranks.items() if name not in ONLY_WITH_EXPERTS}
    return [
        *_sizes_unlike_config(config, ranks),
        *_overlapping(ranks),
        *_outside_data_parallel(ranks),
        *_unlike_dense_ranks(ranks),
    ]


def _sizes_unlike_config(config: Any, ranks: RanksOfGroups) -> Iterator[str]:
    for name, option in SIZES.items():
        size = getattr(config, option, 1)
        if name in ranks and len(ranks[name]) != size:
            yield (
                f"{option}={size}, but the {name} process group has {len(ranks[name])} ranks "
                f"{list(ranks[name])}. Initialize the groups with the sizes of the model config"
            )


def _overlapping(ranks: RanksOfGroups) -> Iterator[str]:
    me = dist.get_rank()
    for first, second in CROSSING:
        if first not in ranks or second not in ranks:
            continue
        shared = set(ranks[first]).intersection(ranks[second])
        if shared - {me}:
            yield (
                f"process groups {first}={list(ranks[first])} and {second}={list(ranks[second])} "
                f"share ranks {sorted(shared)}, expected [{me}]. Make the groups of one grid of "
                "ranks, each along a different axis"
            )


def _outside_data_parallel(ranks: RanksOfGroups) -> Iterator[str]:
    if "cp" not in ranks or "dp_cp" not in ranks:
        return
    outside = sorted(set(ranks["cp"]).difference(ranks["dp_cp"]))
    if outside:
        yield (
            f"process group dp_cp={list(ranks['dp_cp'])} lacks the ranks {outside} of "
            f"cp={list(ranks['cp'])}, but weights are sharded over data- and context-parallel "
            "ranks. Pass the group of both as dp_cp"
        )


def _unlike_dense_ranks(ranks: RanksOfGroups) -> Iterator[str]:
    """A problem if tp x dp_cp and expt_tp x ep x expt_dp differ: each is the number of ranks of a
    pipeline stage."""
    dense = ("tp", "dp_cp")
    of_experts = ("expt_tp", "ep", "expt_dp")
    if not ranks.keys() >= {*dense, *of_experts}:
        return
    number = math.prod(len(ranks[name]) for name in dense)
    with_experts = math.prod(len(ranks[name]) for name in of_experts)
    if number != with_experts:
        sizes = {name: list(ranks[name]) for name in (*dense, *of_experts)}
        yield (
            f"process groups {sizes}: tp x dp_cp has {number} ranks, but expt_tp x ep x expt_dp "
            f"has {with_experts}. Set expert_model_parallel_size and expert_tensor_parallel_size "
            "so that their product divides the number of ranks"
        )


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


def _compiled(module: nn.Module) -> Iterator[str]:
    """A problem of the first compiled module: by `torch.compile` or by the method `compile`."""
    for name, child in module.named_modules():
        by_function = isinstance(child, torch._dynamo.OptimizedModule)
        if by_function or child._compiled_call_impl is not None:
            yield (
                f"module {name or type(child).__name__}: compiled modules are not tested with "
                "Megatron's layers, pipelines and fused weight gradients. Wrap the original "
                "module, and compile functions inside the layers"
            )
            return


def _formats_that_do_not_fit(module: nn.Module, config: Any, ddp_config: Any) -> list[str]:
    """A problem of weights in a format that is not supported; or of a model without quantized
    weights, if the DDP config asks for gathers of them.

    A pipeline stage may have only layers in bf16. So the second is no problem if the model config
    asks for quantized weights."""
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


def _experts_in_one_tensor(module: nn.Module) -> Iterator[str]:
    found = [
        name
        for name, child in module.named_modules()
        if any(cls.__name__ in EXPERTS_IN_ONE_TENSOR for cls in type(child).__mro__)
    ]
    if found:
        yield (
            f"module {found[0]} (and {len(found) - 1} more): all experts of this rank are one "
            "tensor, which a checkpoint cannot distinguish from another rank's. Use Transformer "
            "Engine's grouped layers, or set moe_grouped_gemm=False"
        )


def _experts_marked_as_dense(module: nn.Module, config: Any) -> Iterator[str]:
    """A problem of experts' weights that core has marked as dense.

    Core marks experts' weights by `allreduce=False`. Up to 0.18 only the expert-parallel size
    decides this, later also the tensor-parallel sizes."""
    tensor = getattr(config, "tensor_model_parallel_size", None)
    expert_tensor = getattr(config, "expert_tensor_parallel_size", None)
    if expert_tensor == tensor or not is_on(config, "num_moe_experts"):
        return
    found = [
        name
        for name, param in module.named_parameters()
        if ".experts." in f".{name}" and getattr(param, "allreduce", False)
    ]
    if found:
        expert = getattr(config, "expert_model_parallel_size", None)
        yield (
            f"expert_tensor_parallel_size={expert_tensor} with "
            f"tensor_model_parallel_size={tensor} and expert_model_parallel_size={expert}: core "
            f"has marked {found[0]} (and {len(found) - 1} more) as dense weights, whose gradients "
            "would be reduced over the wrong ranks. Make both tensor-parallel sizes equal, or "
            "expert_model_parallel_size larger than 1, or use megatron-core 0.19"
        )


def _parts_that_return_biases(config: Any, ddp_config: Any) -> Iterator[str]:
    """A problem of experts that return their biases: core reads a bias after the unit of the
    expert's part was resharded."""
    has_biases = is_on(config, "num_moe_experts") and is_on(config, "add_bias_linear")
    if has_biases and is_on(ddp_config, GATHER_PARTS):
        yield (
            f"{GATHER_PARTS}=True with add_bias_linear=True: linear layers of experts return their "
            "biases, which are resharded before core adds them. Set either to False"
        )


def _hooks_that_get_nothing(module: nn.Module, fused: bool) -> Iterator[str]:
    """Problems of gradient hooks on parameters whose module writes the gradient by itself. Autograd
    has no gradient there: the hooks would get None, or not run.

    Running them on the bucket was rejected: the result of a hook replaces the gradient, but the
    gradient is already being reduced then."""
    for managed in managed_params(module):
        param = managed.param
        has_hooks = param._backward_hooks or param._post_accumulate_grad_hooks
        if fused and has_hooks and _is_written_by_a_module(managed):
            yield (
                f"parameter {managed.fqns[0]}: it has a gradient hook, and with "
                "gradient_accumulation_fusion=True its module writes the gradient without "
                "autograd, so the hook would receive None. Set "
                "gradient_accumulation_fusion=False, or remove the hook"
            )


def _is_written_by_a_module(managed: ManagedParam) -> bool:
    """True if a module may write the gradient of this parameter by itself: a module that holds it,
    or the output layer, which does not hold a tied weight but marks it."""
    param = managed.param
    if param.ndim != 2:
        return False
    by_holder = any(fuses(owner) for owner, _ in managed.slots)
    return by_holder or is_on(param, "zero_out_wgrad")
