"""What this package says to a recipe, without training it: which options are refused, and what the
GPU of the target lacks. The target is a Hopper GPU with Transformer Engine, pretended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_fsdp_adapter.megatron.options import capability, cuda_graphs, staging_options

CUDA = torch.device("cuda")

HOPPER_LACKS: Mapping[str, str] = {
    "mxfp8": "MXFP8 matrix products: compute capability 10.0",
    "nvfp4": "NVFP4 matrix products: compute capability 10.0",
}
"""Recipes of reduced precision that Transformer Engine does not compute on a Hopper GPU."""

TURNED_ON: tuple[str, ...] = (
    "data_parallel_sharding_strategy", "outer_dp_sharding_strategy",
    "num_distributed_optimizer_instances", "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype", "fsdp_double_buffer",
    "megatron_fsdp_max_pool_double_buffer", "nccl_ub", "fsdp_manual_registration",
    "megatron_fsdp_cuda_graph_mode", "use_torch_fsdp2", "init_model_with_meta_device",
    "calculate_per_token_loss", "gradient_accumulation_fusion", "use_precision_aware_optimizer",
    "fp16", "fp8", "fp8_recipe", "fp8_param_gather", "fp4", "fp4_recipe", "fp4_param_gather",
    "first_last_layers_bf16", "quant_recipe", "cpu_offloading", "cpu_offloading_num_layers",
    "fine_grained_activation_offloading", "offload_modules", "optimizer_cpu_offload",
    "recompute_granularity", "recompute_modules", "cuda_graph_impl", "cuda_graph_scope",
    "cuda_graph_modules", "num_moe_experts", "moe_paged_stash", "moe_expert_rank_capacity_factor",
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "moe_latent_size", "moe_grouped_gemm",
    "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_shared_expert_overlap",
    "moe_router_enable_expert_bias", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
    "overlap_dispatch_backward_with_experts_wgrad", "tp_comm_overlap", "mtp_num_layers",
    "multi_latent_attention", "use_transformer_engine_op_fuser", "async_save", "ckpt_format",
)  # fmt: skip
"""Options that concern the wrapper; what a recipe says of them is in the table."""

DEPENDENT: Mapping[str, str] = {
    "fp8_recipe": "fp8", "fp8_param_gather": "fp8", "fp4_recipe": "fp4", "fp4_param_gather": "fp4",
    "cpu_offloading_num_layers": "cpu_offloading", "cuda_graph_scope": "cuda_graph_impl",
    "cuda_graph_modules": "cuda_graph_impl", "recompute_modules": "recompute_granularity",
    "offload_modules": "fine_grained_activation_offloading",
    "expert_model_parallel_size": "num_moe_experts", "moe_grouped_gemm": "num_moe_experts",
    "moe_token_dispatcher_type": "num_moe_experts", "moe_shared_expert_overlap": "num_moe_experts",
    "moe_flex_dispatcher_backend": "num_moe_experts", "moe_latent_size": "num_moe_experts",
    "moe_router_enable_expert_bias": "num_moe_experts",
}  # fmt: skip
"""Options that say nothing while another is off."""

KINDS = ("num_moe_experts", "moe_latent_size", "mtp_num_layers", "cpu_offloading_num_layers")
"""Sizes of a model of which only counts that they are there."""

NOTHING = (None, False, 1, 0, [], (), "none", "no_shard", "auto")


def turned_on(refused: Iterable[str], *configs: Any) -> dict[str, Any]:
    """What the configs, the first that has a field counting, say of `TURNED_ON` and of what is
    refused, as plain values; without what is off."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys([*TURNED_ON, *refused]):
        owner = next((config for config in configs if hasattr(config, name)), None)
        value = _plain(getattr(owner, name, None))
        if _is_said(name, value) and (name not in DEPENDENT or DEPENDENT[name] in found):
            found[name] = True if name in KINDS else value
    if found.get("moe_token_dispatcher_type") != "flex":
        found.pop("moe_flex_dispatcher_backend", None)
    return found


def _is_said(name: str, value: Any) -> bool:
    if name == "megatron_fsdp_main_params_dtype" and value == "float32":
        return False
    return value is True or value not in NOTHING


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return getattr(value, "value", value)
    return str(getattr(value, "name", value)).removeprefix("torch.")


@contextmanager
def on_hopper(environment: Mapping[str, str]) -> Iterator[None]:
    """While it lasts, `device_problems` answers as a Hopper GPU with Transformer Engine would, and
    the process has this environment as well."""

    def answer(recipe: str, device: torch.device) -> str | None:
        return HOPPER_LACKS.get(recipe)

    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(capability, "reason_against", answer),
        mock.patch.object(capability, "device_name", lambda device: "a Hopper GPU"),
    ):
        yield


def construction_lines(config: Any, ddp_config: Any, asks_tokens: bool) -> list[str]:
    """What the wrapper's constructor says of configs alone, beside the rules for options: CUDA
    graphs and registered buffers, on a GPU."""
    return [
        *cuda_graphs.problems(config, ddp_config, CUDA, asks_tokens),
        *staging_options.problems(ddp_config, CUDA, {}),
    ]


def waits_for(config: Any) -> list[str]:
    """What of the model config a Hopper GPU cannot compute. Inside `on_hopper`."""
    asked = capability.recipe_of(config)
    if not capability.device_problems(config, CUDA):
        return []
    assert asked is not None
    return [HOPPER_LACKS[asked[1]]]


def by_option(lines: Iterable[str]) -> dict[str, str]:
    """Option -> reason, of lines `[section.]option=value: reason; remedy`. The same option in
    several configs counts once."""
    found: dict[str, str] = {}
    for line in lines:
        option, _, rest = line.partition("=")
        found.setdefault(option.split(".")[-1], rest.partition(": ")[2])
    return found


def result(name: str, source: str, on: Mapping[str, Any], refused: Mapping[str, str],
           waits: list[str]) -> dict[str, Any]:  # fmt: skip
    """A row of the table. One that is refused says too what it would wait for."""
    kind = "refused" if refused else "waits" if waits else "accepted"
    return {"name": name, "source": source, "class": kind, "refused": dict(sorted(refused.items())),
            "waits": waits, "on": dict(on)}  # fmt: skip
