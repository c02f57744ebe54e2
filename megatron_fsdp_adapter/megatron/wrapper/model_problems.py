"""Problems of a Megatron model that is to be wrapped, beside its configuration.

One line for each problem, so that the wrapper can raise all at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.engine.partition import ManagedParam, managed_params
from ...quantized import format_of
from ..layers.fused_wgrad import asks_fusion, fuses
from ..options.rules import is_on
from ..options.settings import FP8_PARAM, FP8_PARAM_GATHER
from ..options.table import GATHER_PARTS

EXPERTS_IN_ONE_TENSOR = ("GroupedMLP",)
"""Classes of core, by name. Core takes this one for `moe_grouped_gemm` wherever it has no layers of
Transformer Engine, so the option that asks for it is no evidence."""


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
    return [
        f"module {found[0]} (and {len(found) - 1} more): all experts of this rank are one tensor, "
        "which a checkpoint cannot distinguish from another rank's. Use Transformer Engine's "
        "grouped layers, or set moe_grouped_gemm=False"
    ] if found else []


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
    return [
        f"expert_tensor_parallel_size={sizes[0]} with tensor_model_parallel_size={sizes[1]} and "
        f"expert_model_parallel_size={sizes[2]}: core has marked {found[0]} (and {len(found) - 1} "
        "more) as dense weights, whose gradients would be reduced over the wrong ranks. Make "
        "both tensor-parallel sizes equal, or expert_model_parallel_size larger than 1, or use "
        "megatron-core 0.19"
    ] if found else []


def _parts_that_return_biases(config: Any, ddp_config: Any) -> list[str]:
    """A bias that a unit returns is read when the unit is resharded."""
    if not is_on(ddp_config, GATHER_PARTS) or not getattr(config, "num_moe_experts", None):
        return []
    return [
        f"{GATHER_PARTS}=True with add_bias_linear=True: linear layers of experts return their "
        "biases, which are resharded before core adds them. Set either to False"
    ] if getattr(config, "add_bias_linear", False) else []


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
        and fused and _is_written_by_a_module(managed)
    ]


def _is_written_by_a_module(managed: ManagedParam) -> bool:
    """A tied weight too: it is handed to the output layer, which marks it."""
    param = managed.param
    by_holder = any(fuses(owner) for owner, _ in managed.slots)
    return param.ndim == 2 and (by_holder or bool(getattr(param, "zero_out_wgrad", False)))
