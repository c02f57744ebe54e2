"""The line that a wrapper prints: what it does, and what it switched on by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.engine.group import ParamGroup
from ...core.topology import DENSE
from ...plan.unsharded_budget import AUTO, GIB, OPTION
from ..options.rules import is_on
from ..options.settings import FP8_PARAM
from ..options.unit_size import described
from .model_plan import ModelPlan


def announcement(
    plan: ModelPlan, groups: list[ParamGroup], config: Any, forced: Mapping[str, Any]
) -> str:
    """One line for `groups`, made by `plan`. `config` is the model's; forced: options that the
    wrapper has set, and their values."""
    engine, axis = plan.config, plan.domains[DENSE].axis
    numel = sum(group.layout.item_numel for group in groups)
    padding = sum(group.layout.total_numel for group in groups) - numel
    text = (
        f"FullyShardedDataParallel: strategy {engine.strategy.name} over {axis.size} "
        f"ranks, {len(plan.units)} units ({', '.join(plan.classes)}, root), "
        f"{numel} parameters{_quantized(groups, config)}, {100 * padding / numel:.2f}% padding; "
        f"main weights {_dtype_name(engine.policy.main_params_dtype)}"
        f"{' in host memory' if engine.offload else ''}, gradients reduced in "
        f"{_wire(plan, groups)}; {_unsharded(plan, groups)}{described(plan.units)}"
        f"{'set by the wrapper: ' if forced else ''}"
    )
    return text.removesuffix("; ") + ", ".join(f"{name}={value}" for name, value in forced.items())


def _dtype_name(dtype: torch.dtype | None) -> str:
    return "in each parameter's dtype" if dtype is None else str(dtype)


def _wire(plan: ModelPlan, groups: list[ParamGroup]) -> str:
    """The dtype that gradients are reduced in."""
    comm = str(plan.config.policy.comm_dtype)
    narrow = {
        str(group.bucket.tensor.dtype)
        for group in groups
        if group.key.requires_grad and group.has_transient_bucket
    } - {comm}
    carried = f" (gradients from autograd, exchanged as {', '.join(sorted(narrow))})"
    return comm + (carried if narrow else "")


def _unsharded(plan: ModelPlan, groups: list[ParamGroup]) -> str:
    """Text about what is not sharded: domains of one rank, and what a budget keeps over a step."""
    names = (group.key.domain for group in groups if group.is_single_rank)
    alone = {name.split(",")[0] for name in names}
    text = f"unsharded on one rank: {', '.join(sorted(alone))} parameters; " if alone else ""
    if plan.budget is None:
        return text + f"units stay unsharded over a step as memory allows ({OPTION}={AUTO!r}); "
    if not plan.budget:
        return text
    kept = plan.kept
    return text + (
        f"unsharded over a step: weights of {kept.weights} and gradients of {kept.grads} of "
        f"{len(kept.rows)} units, for {kept.nbytes / GIB:.3f} of {plan.budget / GIB:g} GiB; "
    )


def _quantized(groups: list[ParamGroup], config: Any) -> str:
    """Text about the number and formats of this rank's quantized parameters. Printed also if there
    are none though they were asked for: layers that are not Transformer Engine's make none."""
    quantized = [group for group in groups if group.key.quantized]
    if not quantized and not is_on(config, FP8_PARAM):
        return ""
    numel = sum(group.layout.item_numel for group in quantized)
    formats = sorted({group.key.format.name for group in quantized})
    return f" ({numel} of them quantized{': ' if formats else ''}{', '.join(formats)})"
