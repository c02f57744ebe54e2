"""A plan as text, as JSON, and as flags to paste."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_fsdp_adapter.models.sources import parallel_options
from megatron_fsdp_adapter.models.spec import ModelSpec, is_layer
from megatron_fsdp_adapter.sharding.unsharded_budget import GIB

from . import features
from .configurations import Configuration
from .features import RECIPE_OF
from .prediction import Prediction
from .search import Plan, Wanted
from .timing import Timeline

SHOWN, REASONS = 5, 12
"""Maximum kinds of time or memory in a line; maximum lines about configurations that were not
chosen."""


def ddp_options(chosen: Configuration) -> dict[str, Any]:
    """Fields of the DDP config that differ from the runner's settings."""
    options: dict[str, Any] = {"data_parallel_sharding_strategy": chosen.strategy}
    if chosen.instances > 1:
        options["num_distributed_optimizer_instances"] = chosen.instances
        options["outer_dp_sharding_strategy"] = "optim" if chosen.outer_optim else "no_shard"
    if chosen.slots["weight_slots"] and not chosen.copies:
        options["fsdp_double_buffer"] = True
    if chosen.copies:
        options["fsdp_copy_engine_all_gather"] = True
        options["fsdp_copy_engine_reduce_scatter"] = True
    options |= features.ddp_options(chosen.features)
    if chosen.separate_gathers:
        options["create_all_gather_group"] = True
    return options


def model_options(spec: ModelSpec, chosen: Configuration) -> dict[str, Any]:
    """Options of the model's config and the run."""
    options: dict[str, Any] = {"micro_batch_size": chosen.microbatch}
    options |= parallel_options(spec, chosen.parallel)
    if chosen.parallel.recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform",
                    "recompute_num_layers": 1}  # fmt: skip
    if chosen.graph:
        options["cuda_graph_impl"] = "full_iteration"
    return options | features.model_options(chosen.features)


def megatron_flags(spec: ModelSpec, chosen: Configuration) -> str:
    """Shell arguments for the runner of Megatron-LM's scripts."""
    words = ["--use-megatron-fsdp"]
    for name, value in {**model_options(spec, chosen), **ddp_options(chosen)}.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(shlex.quote(str(value)))
    return " ".join(words)


BRIDGE_FIELDS = {
    "micro_batch_size": "train.micro_batch_size", "fp8_format": "mixed_precision.fp8",
    "fp8_recipe": "mixed_precision.fp8_recipe",
    "fp8_param_gather": "mixed_precision.fp8_param_gather",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
}  # fmt: skip
"""Option -> field of a recipe's config, if that is not the model's field of the same name."""


def bridge_overrides(spec: ModelSpec, chosen: Configuration) -> str:
    """Shell arguments for a recipe of Megatron-Bridge."""
    words = [f"ddp.{name}={value}" for name, value in ddp_options(chosen).items()]
    for name, value in model_options(spec, chosen).items():
        words.append(f"{BRIDGE_FIELDS.get(name, f'model.{name}')}={value}")
    return " ".join(map(shlex.quote, words))


PLAIN_ARGUMENTS = ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy")


def plain_call(chosen: Configuration) -> str | None:
    """The call of `fully_shard_model`, with a remark on options that it does not have; None with
    model parallelism, which it does not support."""
    parallel = chosen.parallel
    if parallel.tensor * parallel.pipeline * parallel.context * parallel.expert > 1:
        return None
    options = ddp_options(chosen)
    outer = options.pop("num_distributed_optimizer_instances", None)
    axes = (outer, chosen.gpus // outer) if outer else (chosen.gpus,)
    known = ", ".join(f"{k}={v!r}" for k, v in options.items() if k in PLAIN_ARGUMENTS)
    others = [name for name in options if name not in PLAIN_ARGUMENTS]
    text = (f"fully_shard_model(module, init_device_mesh('cuda', {axes}), "
            f"fsdp_unit_modules=['THE_LAYER'], {known})")  # fmt: skip
    return f"{text}  # without {', '.join(others)}: Megatron's only" if others else text


def benchmark_row(chosen: Configuration) -> str | None:
    """The row of scripts/benchmark.py that measures it, or None."""
    parallel = chosen.parallel
    features = chosen.features
    if parallel != type(parallel)(expert=parallel.expert) or chosen.instances > 1:
        return None
    kind = {(True, True): "ours-ce-graph", (True, False): "ours-ce-rs",
            (False, True): "ours-graph", (False, False): "ours"}[chosen.copies, chosen.graph]
    if chosen.separate_gathers and kind == "ours":
        kind = "ours-ag"
    if features.layer_graphs:
        kind = "ours-ce-layers" if chosen.copies else "ours-layers"
    name = f"{kind}:{chosen.strategy}"
    name += f"+{features.budget_gib:g}" if features.budget_gib else ""
    form = features.quantized.weights or features.quantized.products
    if form is None:
        return name
    return f"{name}@fp8{'w' if features.quantized.weights else ''}_{RECIPE_OF[form.name]}"


BENCHMARK_PRESETS = ("llama-1.5b", "llama3-8b", "llama-13b", "llama-30b")
"""Models with a file in configs/, by its name."""


def benchmark_command(wanted: Wanted, chosen: Configuration) -> str | None:
    """The command that measures it on this machine, from a checkout, or None."""
    row, spec = benchmark_row(chosen), wanted.spec
    if row is None or chosen.gpus > wanted.machine.network.domain:
        return None
    name = spec.name.split(",")[0]
    preset = f"configs/{name}.yaml" if name in BENCHMARK_PRESETS else "THE_MODEL.yaml"
    options = {
        "ranks": chosen.gpus, "wrappers": row, "out": "runs/plan", "preset": preset,
        "num-layers": spec.num_layers, "seq-length": spec.tokens,
        "micro-batch-size": chosen.microbatch,
        "num-microbatches": chosen.microbatches(wanted.global_batch),
    }  # fmt: skip
    if chosen.parallel.expert > 1:
        options["expert-model-parallel-size"] = chosen.parallel.expert
    if chosen.features.unit_numel is not None:
        options["suggested-communication-unit-size"] = chosen.features.unit_numel
    words = [f"--{name} {value}" for name, value in options.items()]
    words += ["--gradient-accumulation-fusion"] if chosen.fused else []
    return " ".join(["python scripts/benchmark.py", *words])


def plain(plan: Plan, top: int) -> dict[str, Any]:
    """The plan as plain values."""
    wanted = plan.wanted
    return {
        "model": wanted.spec.name,
        "parameters": wanted.spec.num_parameters,
        "gpus": wanted.gpus,
        "global_batch_size": wanted.global_batch,
        "seq_length": wanted.spec.tokens,
        "gpu": wanted.machine.gpu.name,
        "network": wanted.machine.network.name,
        "memory_gib": wanted.memory_gib,
        "not_counted": list(wanted.spec.left_out),
        "configurations": [_plain_row(wanted.spec, one) for one in plan.predictions[:top]],
        "why_not": [
            *({"configuration": one.configuration.name, "reason": _slower(one, plan)}
              for one in plan.predictions[top:]),
            *({"configuration": name, "reason": reason} for name, reason in plan.refused),
        ],
    }  # fmt: skip


def _plain_row(spec: ModelSpec, one: Prediction) -> dict[str, Any]:
    chosen = one.configuration
    return {
        "name": chosen.name,
        "ms": one.ms,
        "tokens_per_second_per_gpu": one.tokens_per_gpu,
        "tflops_per_gpu": one.tflops,
        "mfu": one.mfu,
        "peak_bytes": one.peak_bytes,
        "bytes": dict(one.memory),
        "exposed_ms": one.exposed_ms,
        "spent_ms": dict(one.spent),
        "limit": one.limit,
        "megatron_lm": megatron_flags(spec, chosen),
        "megatron_bridge": bridge_overrides(spec, chosen),
        "fully_shard_model": plain_call(chosen),
        "benchmark_row": benchmark_row(chosen),
    }


def _slower(one: Prediction, plan: Plan) -> str:
    best = plan.predictions[0]
    return f"{one.ms / best.ms - 1:.0%} slower; {one.limit}"


def render(plan: Plan, top: int) -> str:
    """The plan as text."""
    wanted, machine = plan.wanted, plan.wanted.machine
    rows = [("configuration", "ms/step", "tok/s/GPU", "TFLOP/s", "MFU", "peak GiB", "exposed ms",
             "limited by")]  # fmt: skip
    for one in plan.predictions[:top]:
        rows.append((
            one.configuration.name, f"{one.ms:,.1f}", f"{one.tokens_per_gpu:,.0f}",
            f"{one.tflops:,.0f}", f"{one.mfu:.1%}", f"{one.peak_bytes / GIB:.1f}",
            f"{one.exposed_ms:,.1f}", one.limit,
        ))  # fmt: skip
    best = plan.predictions[0]
    lines = [
        f"{wanted.spec.name}: {wanted.spec.num_parameters / 1e9:,.1f}B parameters on "
        f"{wanted.gpus:,} {machine.gpu.name}; network: {machine.network.name}",
        f"global batch {wanted.global_batch:,} x {wanted.spec.tokens:,} tokens, "
        f"{wanted.memory_gib:g} GiB a GPU",
        *(f"not counted: {line}" for line in wanted.spec.left_out),
        "", *aligned(rows), *_legend(plan.predictions[:top]), "",
        "the first one: peak memory: " + _largest(best.memory, 1 / GIB, "GiB"),
        "               time: " + _largest(_times(best.spent), 1.0, "ms"),
        *_margin(plan),
        f"  Megatron-LM        {megatron_flags(wanted.spec, best.configuration)}",
        f"  Megatron-Bridge    {bridge_overrides(wanted.spec, best.configuration)}",
    ]  # fmt: skip
    call = plain_call(best.configuration)
    if call is not None:
        lines.append(f"  plain PyTorch      {call}")
    command = benchmark_command(wanted, best.configuration)
    if command is not None:
        lines.append(f"  to measure it      {command}")
    others = [(one.configuration.name, _slower(one, plan)) for one in plan.predictions[top:]]
    reasons = [*others, *_together(plan.refused)]
    if reasons:
        lines += ["", "why not"]
    lines += [f"  {name}: {reason}" for name, reason in reasons[:REASONS]]
    if len(reasons) > REASONS:
        lines.append(f"  and {len(reasons) - REASONS} more (--json names them)")
    return "\n".join(lines)


LEGEND = {
    "compute": "nothing except forward and backward exceeds 5% of a step",
    "exposed": 'exposed communication; "of the model": of tensor, context or expert '
    "parallelism",
    "waits for the host": "the GPU is idle until the host has launched its kernels",
    "pipeline bubble": "stages wait for the first and the last microbatch",
    "optimizer": "the update of main weights",
    "norm": "the norm of the gradients",
}
"""Values of `Prediction.limit`, and their meanings."""


def _legend(rows: Sequence[Prediction]) -> list[str]:
    return [
        f"  limited by {name}: {what}" for name, what in LEGEND.items()
        if any(one.limit.startswith(name) for one in rows)
    ]


TIGHT, AS_FAST = 0.95, 1.02
"""Fraction of the memory above which a prediction error may exceed it; ratio of times that count as
equal."""


def _margin(plan: Plan) -> list[str]:
    """A line if the first configuration leaves little memory, with another one that leaves more."""
    limit, first = plan.wanted.memory_gib * GIB, plan.predictions[0]
    if first.peak_bytes <= TIGHT * limit:
        return []
    left = f"{(limit - first.peak_bytes) / GIB:.1f} of {plan.wanted.memory_gib:g} GiB"
    said = f"               margin: {left} are left, and predicted peaks had errors up to 7%"
    for one in plan.predictions[1:]:
        if one.peak_bytes <= TIGHT * limit and one.ms <= AS_FAST * first.ms:
            return [f"{said}; {(limit - one.peak_bytes) / GIB:.1f} with {one.configuration.name}, "
                    f"{one.ms / first.ms - 1:.1%} slower"]  # fmt: skip
    return [f"{said}; --memory-gib plans for less"]


def _together(refused: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rejected configurations grouped by reason: the first name, and the number of others."""
    names: dict[str, list[str]] = {}
    for name, reason in refused:
        names.setdefault(reason, []).append(name)
    return [
        (first if not more else f"{first}, and {len(more)} like it", reason)
        for reason, (first, *more) in names.items()
    ]


def _times(spent: Mapping[str, float]) -> dict[str, float]:
    """`spent` without "products", which other purposes contain."""
    return {name: ms for name, ms in spent.items() if name != "products"}


def _largest(parts: Mapping[str, float], factor: float, unit: str) -> str:
    largest = sorted(parts.items(), key=lambda entry: -entry[1])[:SHOWN]
    return ", ".join(f"{name} {value * factor:,.1f} {unit}" for name, value in largest)


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Aligned columns. The last column and those in `left` are left-aligned, the others
    right-aligned."""
    *widths, _ = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row[:-1], widths, strict=True))
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def second_step(timeline: Timeline) -> int:
    """Number of operations before the timed step. The first step learns the order of units."""
    return [count for name, count in timeline.program.marks if name == "step"][1]


def layers_run(timeline: Timeline) -> int:
    """Number of simulated layer units."""
    named = {one.label.removeprefix("forward ") for one in timeline.program.operations}
    return sum(1 for name in named if is_layer(name) and "/" not in name)


def explain(timeline: Timeline, layers: int) -> str:
    """A table of the engine's second step: each launch with its stream, its dependencies and its
    time. layers: those of the model's stage."""
    program = timeline.program
    first, known = second_step(timeline), layers_run(timeline)
    rows = [("ms", "to", "stream", "kind", "what", "launch", "waits for")]
    for index in range(first, len(program.operations)):
        one = program.operations[index]
        after = [str(i - first) for i in one.after if i >= first]
        rows.append((
            f"{1e3 * (timeline.starts[index] - timeline.begin):.2f}",
            f"{1e3 * (timeline.ends[index] - timeline.begin):.2f}", one.role, one.kind.value,
            one.label.removeprefix(f"{one.kind.value}: ") or UNNAMED.get(one.role, one.part),
            str(index - first), ", ".join(after),
        ))  # fmt: skip
    said = (
        f"{known} of {layers} layers were simulated; each further one takes as long as one of them"
    )
    return "\n".join([said] * (known < layers) + aligned(rows, left=(2, 3, 4)))


UNNAMED = {"gather": "casts of weights", "reduce": "copies and sums of gradients"}
"""Stream -> description of operations without a label."""
