"""What CUDA graphs of layers (`cuda_graph_impl="local"`, `layer_graphs.py`) exclude."""

from __future__ import annotations

from typing import Any

import torch

from ...core.config import STRATEGIES
from ...sharding.unsharded_budget import OPTION as BUDGET
from .cuda_graphs import captures_layers, modules_asked_for
from .staging_options import slots_wanted
from .unit_grouping import UNIT_NUMEL

CAPTURED_PARTS = frozenset({"attn", "mlp", "mamba"})
"""Names of parts of layers that can be captured. Those of experts run eagerly: their dispatch reads
on the host how many tokens each one got."""


def problems(config: Any, ddp_config: Any, device: torch.device) -> list[str]:
    """One line for each option that graphs of layers exclude."""
    if not captures_layers(config):
        return []
    found = _problems_of_place(config, ddp_config, device)
    excluded = {
        "recompute_granularity": ("full", "layers that are recomputed run eagerly; use "
                                  "'selective', or cuda_graph_impl='full_iteration'"),
        "fp8_recipe": ("delayed", "its scales are updated from a list that modules enter when they "
                       "are called; use 'tensorwise', 'blockwise' or 'mxfp8'"),
    }  # fmt: skip
    for option, (value, reason) in excluded.items():
        if _name_of(getattr(config, option, None)) == value and (
            option != "fp8_recipe" or getattr(config, "fp8", None)
        ):
            found.append(f"{option}={value!r} with CUDA graphs of layers: {reason}")
    for option, reason in _LAYERS_EXCLUDE.items():
        if getattr(config, option, None) or getattr(ddp_config, option, None):
            found.append(f"{option} with CUDA graphs of layers: {reason}; switch it off")
    recomputed = getattr(config, "recompute_modules", None) or ()
    if _name_of(getattr(config, "recompute_granularity", None)) != "selective":
        recomputed = ()
    dropout: float = getattr(config, "attention_dropout", 0)
    if "core_attn" in recomputed and dropout:
        found.append(
            f"attention_dropout={dropout} with recompute_modules 'core_attn' and "
            "CUDA graphs of layers: random states that graphs can use are not set back, so what is "
            "recomputed would drop others; leave 'core_attn' out, or set attention_dropout to 0.0"
        )
    if "moe" in recomputed:
        found.append(
            "recompute_modules with 'moe' and CUDA graphs of layers: core leaves it to its own "
            "graphs, which are not used; leave 'moe' out"
        )
    if (getattr(config, "context_parallel_size", 1) or 1) > 1:
        found.append(
            "context_parallel_size>1 with CUDA graphs of layers: attention works on streams of its "
            "own; use 1, or cuda_graph_impl='full_iteration'"
        )
    return found


def _problems_of_place(config: Any, ddp_config: Any, device: torch.device) -> list[str]:
    """Of what is captured, and of where weights and gradients are."""
    found = []
    if device.type != "cuda":
        found.append(
            f"cuda_graph_impl={config.cuda_graph_impl!r}: the model is on {device}, where there "
            "are no CUDA graphs; use 'none'"
        )
    unknown = modules_asked_for(config) - CAPTURED_PARTS
    if unknown:
        found.append(
            f"cuda_graph_modules={sorted(unknown)} (cuda_graph_scope): of layers "
            f"{sorted(CAPTURED_PARTS)} can be captured, or, left empty, all but the experts; leave "
            "the others out, they run eagerly"
        )
    row = STRATEGIES.get(ddp_config.data_parallel_sharding_strategy)
    if row is not None and not row.shard_grads:
        found.append(
            f"data_parallel_sharding_strategy={row.name!r} with CUDA graphs of layers: a graph "
            "writes a fresh bucket in every backward, and this strategy adds to kept gradients; "
            "use 'optim_grads' or 'optim_grads_params', or cuda_graph_impl='full_iteration'"
        )
    slots = slots_wanted(ddp_config)
    if not (slots["weight_slots"] and slots["bucket_slots"]):
        found.append(
            "fsdp_double_buffer=False with CUDA graphs of layers: a graph reads weights and writes "
            "gradients at fixed addresses; set it to True"
        )
    return found


def _name_of(value: Any) -> Any:
    return getattr(value, "value", value)


_LAYERS_EXCLUDE = {
    "keep_fp8_transpose_cache": "a replay does not make transposes that were there at its capture",
    "qk_clip": "a replay notes no largest logits",
    "log_max_attention_logit": "a replay notes no largest logits",
    "cpu_offloading": "a replay calls no hooks on what autograd saves",
    "fine_grained_activation_offloading": "a replay calls no hooks on what autograd saves",
    "delay_wgrad_compute": "weight gradients would come after their unit's bucket is reduced",
    "overlap_moe_expert_parallel_comm": "parts of layers are called by a schedule",
    "tp_comm_overlap": "its buffers are not followed across graphs",
    UNIT_NUMEL: "a graph is of one layer, and has its unit's bucket to itself",
    BUDGET: "a graph writes a fresh bucket in every backward, and units that stay whole add to "
    "kept gradients",
}
"""Options that exclude graphs of layers, with their reasons."""
