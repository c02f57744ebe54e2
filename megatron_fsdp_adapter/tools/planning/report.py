"""A plan as text, as JSON, and as flags to paste."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_fsdp_adapter.build.description import aligned
from megatron_fsdp_adapter.megatron.options.table import EXPERT_INSTANCES, EXPERT_STRATEGY
from megatron_fsdp_adapter.plan.unsharded_budget import GIB
from megatron_fsdp_adapter.tools.models.sources import parallel_options
from megatron_fsdp_adapter.tools.models.spec import DENSE, EXPERT, ModelSpec, Options

from .configurations import ACTIVATIONS, RESERVED, Configuration
from .prediction import PEAK_ERROR, Prediction
from .search import Plan, Request

SHOWN = 5
"""Most kinds of time or memory in a line, beside the sum of all others."""
REASONS = 12
"""Most lines about configurations that were rejected."""


def ddp_options(chosen: Configuration) -> Options:
    """Fields of the DDP config that differ from the runner's settings."""
    options: dict[str, Any] = {"data_parallel_sharding_strategy": chosen.strategy}
    if chosen.instances > 1:
        options["num_distributed_optimizer_instances"] = chosen.instances
        options["outer_dp_sharding_strategy"] = "optim" if chosen.outer_optim else "no_shard"
    if chosen.expert_strategy is not None:
        options[EXPERT_STRATEGY] = chosen.expert_strategy
    if chosen.expert_instances is not None:
        options[EXPERT_INSTANCES] = chosen.expert_instances
    if chosen.slots["weight_slots"] and not chosen.copies:
        options["fsdp_double_buffer"] = True
    if chosen.copies:
        options["fsdp_copy_engine_all_gather"] = True
        options["fsdp_copy_engine_reduce_scatter"] = True
    if chosen.separate_gathers:
        options["create_all_gather_group"] = True
    return options


def model_options(spec: ModelSpec, chosen: Configuration) -> Options:
    """Options of the model's config and of the run, such as the micro batch."""
    options: dict[str, Any] = {"micro_batch_size": chosen.microbatch}
    options |= parallel_options(spec, chosen.parallel)
    if chosen.parallel.recompute:
        options["recompute_granularity"] = "full"
        options["recompute_method"] = "uniform"
        options["recompute_num_layers"] = 1
    if chosen.graph:
        options["cuda_graph_impl"] = "full_iteration"
    return options


def megatron_flags(spec: ModelSpec, chosen: Configuration) -> str:
    """Shell arguments for the runner of Megatron-LM's scripts."""
    words = ["--use-megatron-fsdp"]
    for name, value in {**model_options(spec, chosen), **ddp_options(chosen)}.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(shlex.quote(str(value)))
    return " ".join(words)


BRIDGE_FIELDS = {
    "micro_batch_size": "train.micro_batch_size",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
}
"""Option -> field of a recipe's config, if that is not the model's field of the same name."""


def bridge_overrides(spec: ModelSpec, chosen: Configuration) -> str:
    """Shell arguments for a recipe of Megatron-Bridge."""
    words = [f"ddp.{name}={value}" for name, value in ddp_options(chosen).items()]
    for name, value in model_options(spec, chosen).items():
        field = BRIDGE_FIELDS.get(name, f"model.{name}")
        words.append(f"{field}={value}")
    return " ".join(map(shlex.quote, words))


def plain(plan: Plan, top: int) -> dict[str, Any]:
    """The plan as plain values, with the best `top` configurations."""
    wanted = plan.wanted
    spec = wanted.spec
    machine = wanted.machine
    rows = [_plain_row(wanted, one) for one in plan.predictions[:top]]
    why_not = [{"configuration": name, "reason": reason} for name, reason in plan.refused]
    return {
        "model": spec.name,
        "parameters": spec.num_parameters,
        "gpus": wanted.gpus,
        "global_batch_size": wanted.global_batch,
        "seq_length": spec.tokens,
        "gpu": machine.gpu.name,
        "network": machine.network.name,
        "memory_gib": wanted.memory_gib,
        "not_counted": list(spec.left_out),
        "configurations": rows,
        "why_not": why_not,
    }


def _unsharded(spec: ModelSpec, one: Prediction) -> list[str]:
    """The kinds of the model's parameters that are on one rank of each instance."""
    kinds = (DENSE, EXPERT) if spec.num_experts else (DENSE,)
    return [kind for kind in one.configuration.unsharded if kind in kinds]


def _plain_row(wanted: Request, one: Prediction) -> dict[str, Any]:
    spec = wanted.spec
    chosen = one.configuration
    return {
        "name": chosen.name,
        "ms": one.ms,
        "tokens_per_second_per_gpu": one.tokens_per_gpu,
        "tflops_per_gpu": one.tflops,
        "mfu": one.mfu,
        "peak_bytes": one.peak_bytes,
        "device_bytes": one.device_bytes,
        "may_not_fit": one.may_exceed(wanted.memory_gib * GIB),
        "unsharded": _unsharded(wanted.spec, one),
        "bytes": dict(one.memory),
        "exposed_ms": one.exposed_ms,
        "spent_ms": dict(one.spent),
        "limit": one.limit,
        "megatron_lm": megatron_flags(spec, chosen),
        "megatron_bridge": bridge_overrides(spec, chosen),
    }


COLUMNS = (
    "configuration", "ms/step", "tok/s/GPU", "TFLOP/s", "MFU", "peak GiB", "device GiB",
    "exposed ms", "limited by",
)  # fmt: skip

NEAR_LIMIT = "?"
"""Mark of a row that may not fit."""


def _row(wanted: Request, one: Prediction) -> tuple[str, ...]:
    unsharded = [f"{kind} parameters unsharded" for kind in _unsharded(wanted.spec, one)]
    mark = NEAR_LIMIT if one.may_exceed(wanted.memory_gib * GIB) else ""
    return (
        ", ".join([one.configuration.name, *unsharded]),
        f"{one.ms:,.1f}",
        f"{one.tokens_per_gpu:,.0f}",
        f"{one.tflops:,.0f}",
        f"{one.mfu:.1%}",
        f"{one.peak_bytes / GIB:.1f}",
        f"{one.device_bytes / GIB:.1f}{mark}",
        f"{one.exposed_ms:,.1f}",
        one.limit,
    )


def render(plan: Plan, top: int) -> str:
    """The plan as text, with the best `top` configurations."""
    wanted = plan.wanted
    spec = wanted.spec
    machine = wanted.machine
    billions = spec.num_parameters / 1e9
    lines = [
        f"{spec.name}: {billions:,.1f}B parameters on "
        f"{wanted.gpus:,} {machine.gpu.name}; network: {machine.network.name}",
        f"global batch {wanted.global_batch:,} x {spec.tokens:,} tokens, "
        f"{wanted.memory_gib:g} GiB a GPU",
    ]
    lines += [f"not counted: {line}" for line in spec.left_out]
    lines.append("")
    shown = plan.predictions[:top]
    lines += aligned([COLUMNS, *(_row(wanted, one) for one in shown)])
    lines += _remarks(wanted, shown)
    lines.append("")
    best = plan.predictions[0]
    # Other purposes contain the products.
    times = {name: ms for name, ms in best.spent.items() if name != "products"}
    moment = "when a forward ends" if ACTIVATIONS in best.memory else "when a backward ends"
    lines.append(f"the first one: device memory {moment}: " + _largest(best.memory, 1 / GIB, "GiB"))
    lines.append("               time: " + _largest(times, 1.0, "ms"))
    lines.append(f"  Megatron-LM        {megatron_flags(spec, best.configuration)}")
    lines.append(f"  Megatron-Bridge    {bridge_overrides(spec, best.configuration)}")
    reasons = _together(plan.refused)
    if reasons:
        lines += ["", "why not"]
    lines += [f"  {name}: {reason}" for name, reason in reasons[:REASONS]]
    if len(reasons) > REASONS:
        lines.append(f"  and {len(reasons) - REASONS} more (--json names them)")
    return "\n".join(lines)


def _remarks(wanted: Request, shown: Sequence[Prediction]) -> list[str]:
    """Lines that explain columns and marks of the table."""
    reserved = f"{wanted.machine.gpu.reserved_gib:g} GiB for {RESERVED}"
    found = [f"peak: the most that torch allocates; device: with {reserved}"]
    if any(one.may_exceed(wanted.memory_gib * GIB) for one in shown):
        found.append(
            f"{NEAR_LIMIT}: may need more than {wanted.memory_gib:g} GiB, because predicted peaks "
            f"have errors up to {PEAK_ERROR:.0%}"
        )
    if any(_unsharded(wanted.spec, one) for one in shown):
        found.append("unsharded: an optimizer instance has one rank for these parameters")
    return found


def _together(refused: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rejected configurations grouped by reason: the first name, and the number of others."""
    names: dict[str, list[str]] = {}
    for name, reason in refused:
        names.setdefault(reason, []).append(name)
    together = []
    for reason, (first, *more) in names.items():
        if more:
            first = f"{first}, and {len(more)} like it"
        together.append((first, reason))
    return together


def _largest(parts: Mapping[str, float], factor: float, unit: str) -> str:
    """The largest parts in a line, each multiplied by `factor`, and the sum of all others."""
    ordered = sorted(parts.items(), key=lambda entry: -entry[1])
    shown = dict(ordered[:SHOWN])
    others = sum(value for _, value in ordered[SHOWN:])
    if others:
        shown["others"] = others
    return ", ".join(f"{name} {value * factor:,.1f} {unit}" for name, value in shown.items())
