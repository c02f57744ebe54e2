"""The line that a wrapper prints: how it shards the model, and which options it set by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...core.engine.group import ParamGroup
from ...core.topology import DENSE, EXPERT
from ...plan.unit_grouping import described
from ...plan.unsharded_budget import AUTO, BUDGET_OPTION, GIB
from ..options.rules import is_on
from ..options.settings import FP8_PARAM
from .model_plan import ModelPlan


def announcement(
    plan: ModelPlan, groups: list[ParamGroup], config: Any, forced: Mapping[str, Any]
) -> str:
    """The line for a model with this plan.

    groups: of the engine. config: of the model. forced: options that the wrapper has set, and their
    values."""
    engine = plan.config
    numel = sum(group.layout.item_numel for group in groups)
    padding = sum(group.layout.total_numel for group in groups) - numel
    place = " in host memory" if engine.offload else ""
    parts = [
        f"FullyShardedDataParallel: strategy {engine.strategies_named} over "
        f"{_ranks(plan, groups)}, {len(plan.units)} units "
        f"({', '.join(plan.classes)}, root), {numel} parameters{_quantized(groups, config)}, "
        f"{100 * padding / numel:.2f}% padding",
        f"main weights {_dtype_name(engine.policy.main_params_dtype)}{place}, gradients reduced "
        f"in {_wire(plan, groups)}",
        *_unsharded(plan, groups),
    ]
    grouped = described(plan.units)
    if grouped:
        parts.append(grouped)
    if forced:
        values = ", ".join(f"{name}={value}" for name, value in forced.items())
        parts.append(f"set by the wrapper: {values}")
    return "; ".join(parts)


def _ranks(plan: ModelPlan, groups: list[ParamGroup]) -> str:
    """The ranks that shard dense parameters, and their replicas; those of experts too, if there
    are other replicas of these."""
    dense = plan.domains[DENSE]
    text = _replicas(plan, DENSE)
    if EXPERT not in {group.key.domain for group in groups}:
        return text
    experts = plan.domains[EXPERT]
    splits = {name: plan.config.of_domain(name).shard_outer for name in (DENSE, EXPERT)}
    is_alike = experts.outer_size == dense.outer_size
    if is_alike and (splits[DENSE] == splits[EXPERT] or dense.outer_size == 1):
        return text
    return f"{text} ({EXPERT}: {_replicas(plan, EXPERT)})"


def _replicas(plan: ModelPlan, name: str) -> str:
    """The number of ranks that shard a domain, and how many replicas there are."""
    domain = plan.domains[name]
    text = f"{domain.axis.size} ranks"
    if domain.outer is None:
        return text
    split = ", split again" if plan.config.of_domain(name).shard_outer else ""
    return f"{text} in {domain.outer_size} replicas{split}"


def _dtype_name(dtype: torch.dtype | None) -> str:
    return "in each parameter's dtype" if dtype is None else str(dtype)


def _wire(plan: ModelPlan, groups: list[ParamGroup]) -> str:
    """The dtype in which gradients are reduced, and those in which some are exchanged instead."""
    comm = str(plan.config.policy.comm_dtype)
    narrow = {
        str(group.grads.bucket.tensor.dtype)
        for group in groups
        if group.key.requires_grad and group.grads.has_transient_bucket
    }
    narrow.discard(comm)
    if not narrow:
        return comm
    return f"{comm} (gradients from autograd, exchanged as {', '.join(sorted(narrow))})"


def _unsharded(plan: ModelPlan, groups: list[ParamGroup]) -> Iterator[str]:
    """Texts about what is not sharded: domains of one rank, and units that a budget keeps."""
    alone = {group.key.domain.split(",")[0] for group in groups if group.is_single_rank}
    if alone:
        yield f"unsharded on one rank: {', '.join(sorted(alone))} parameters"
    if plan.budget is None:
        yield f"units stay unsharded over a step as memory allows ({BUDGET_OPTION}={AUTO!r})"
    elif plan.kept is not None:
        yield plan.kept.described(f"{plan.budget / GIB:g}")


def _quantized(groups: list[ParamGroup], config: Any) -> str:
    """Text about the number and formats of this rank's quantized parameters; empty if there are
    none and none were asked for. If they were asked for, a number of 0 is printed: layers that are
    not Transformer Engine's make no quantized parameters."""
    quantized = [group for group in groups if group.key.quantized]
    if not quantized and not is_on(config, FP8_PARAM):
        return ""
    numel = sum(group.layout.item_numel for group in quantized)
    formats = sorted({group.key.format.name for group in quantized})
    listed = f": {', '.join(formats)}" if formats else ""
    return f" ({numel} of them quantized{listed})"
