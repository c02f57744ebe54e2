"""Counts bytes per rank by kind of buffer and strategy, from a model's configuration alone.

    estimate --preset llama3-8b --data-parallel-size 8 --memory-gib 80
    estimate --config configs/llama-1.5b.yaml --data-parallel-sharding-strategy optim_grads

Needs no GPU, no process group and no weights: parameters are laid out as the engine does it.
Activations, temporary tensors of kernels and the CUDA context are not counted.

Exit status: 0, or 2 for bad input.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_fsdp_adapter.core.config import OUTER_STRATEGIES, STRATEGIES, Strategy
from megatron_fsdp_adapter.megatron.options import ddp_options
from megatron_fsdp_adapter.megatron.options.option import gib
from megatron_fsdp_adapter.megatron.options.rules import is_on
from megatron_fsdp_adapter.megatron.options.staging_options import slots_wanted
from megatron_fsdp_adapter.megatron.options.table import (
    EXPERT_INSTANCES,
    EXPERT_OUTER,
    EXPERT_STRATEGY,
    GATHER_PARTS,
    INSTANCES,
    OUTER,
    UNIT_NUMEL,
)
from megatron_fsdp_adapter.plan.memory import Precision, bytes_between_steps, most_bytes
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO, GIB
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from megatron_fsdp_adapter.tools.models.quantization import STRINGS, Quantization, quantization
from megatron_fsdp_adapter.tools.models.quantization import SWITCHES as FP8_SWITCHES
from megatron_fsdp_adapter.tools.models.sources import (
    Flags,
    add_arguments,
    add_flags,
    from_options,
    name_of,
    options_from,
    split_problems,
)
from megatron_fsdp_adapter.tools.models.spec import DENSE, EXPERT, ModelSpec, Parallel, flag
from megatron_fsdp_adapter.tools.planning.planned import (
    PlannedModel,
    Replicas,
    fullest_stage,
    layer_numels,
    planned_units,
)

from .estimate_text import render
from .output import Report, answer
from .parser import USAGE, Parser, base_parser
from .precision_options import (
    MOMENTS,
    POLICY_DTYPES,
    POLICY_OPTIONS,
    SWITCHES,
    UNFUSED,
    precision,
)

EXPERT_RANKS = "expert_model_parallel_size"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

TENSOR_RANKS = "tensor_model_parallel_size"
PIPELINE_RANKS = "pipeline_model_parallel_size"
MOST_RANKS = 2**16
"""Data-parallel ranks up to which layouts are made in seconds."""
MOST_LAYERS = 10_000

_DTYPE_OPTIONS = {
    option: {"choices": list(POLICY_DTYPES), "help": meaning}
    for option, meaning in POLICY_OPTIONS.items()
}
_SWITCHES = {
    option: {"action": "store_true", "help": meaning}
    for option, meaning in {**SWITCHES, **FP8_SWITCHES}.items()
}

REPLICAS: Flags = {
    INSTANCES: {"type": int, "metavar": "N", "help": "replicas of all shards; default: 1"},
    OUTER: {
        "choices": list(OUTER_STRATEGIES),
        "help": "whether replicas split main weights and optimizer state again; default: no_shard",
    },
    EXPERT_INSTANCES: {
        "type": int,
        "metavar": "N",
        "help": "replicas of experts; default: those of all parameters",
    },
    EXPERT_OUTER: {
        "choices": list(OUTER_STRATEGIES),
        "help": "the outer strategy of experts; default: that of all parameters",
    },
}
"""Options of replicas."""

RUN: Flags = {
    "data_parallel_size": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "data-parallel ranks, those of all replicas; default: %(default)s",
    },
    TENSOR_RANKS: {
        "type": int,
        "metavar": "N",
        "help": "tensor-parallel ranks, which do not split experts; default: 1",
    },
    PIPELINE_RANKS: {
        "type": int,
        "metavar": "N",
        "help": "pipeline stages, of which the one that holds most is counted; default: 1",
    },
    EXPERT_RANKS: {"type": int, "metavar": "N", "help": "ranks that share out experts; default: 1"},
    "data_parallel_sharding_strategy": {
        "choices": list(STRATEGIES),
        "help": "the strategy; default: all of them",
    },
    EXPERT_STRATEGY: {
        "choices": list(STRATEGIES),
        "help": "the strategy of experts; default: that of all parameters",
    },
    **REPLICAS,
    "params_dtype": {
        "choices": list(DTYPES),
        "help": "compute dtype; default: that of --config, else bf16",
    },
    **_DTYPE_OPTIONS,
    **{option: {"help": meaning} for option, meaning in STRINGS.items()},
    **_SWITCHES,
    BUDGET: {
        "type": gib,
        "metavar": "GIB",
        "help": "memory for weights and gradients unsharded over a step; default: 0",
    },
    UNIT_NUMEL: {
        "type": int,
        "metavar": "N",
        "help": (
            "elements up to which layers are grouped into one unit; 0: each layer is one; default: "
            "the wrapper's"
        ),
    },
    "optimizer": {
        "choices": ("adam", *sorted(MOMENTS)),
        "help": "adam (the default), or an optimizer that updates matrices only, beside Adam",
    },
    "rank": {
        "type": int,
        "default": None,
        "metavar": "N",
        "help": "the rank; default: the one that holds most",
    },
    "memory_gib": {
        "type": float,
        "default": None,
        "metavar": "GIB",
        "help": "memory of a GPU: also report what fits in it; default: none",
    },
}
"""Options beside those of the model."""


_PLAN_ACTIVATIONS = "activations are not counted. Leave it out; `plan` prints activations"
NOT_MODELED = {
    GATHER_PARTS: (
        "units of parts of a layer need less than the gathered weights and reduce buckets that it "
        "prints. Leave it out"
    ),
    "init_model_with_meta_device": "the start of a run is not counted. Leave it out",
    "cpu_offloading": _PLAN_ACTIVATIONS,
    "cpu_offloading_num_layers": _PLAN_ACTIVATIONS,
    "fine_grained_activation_offloading": _PLAN_ACTIVATIONS,
    "offload_modules": _PLAN_ACTIVATIONS,
}
"""Options that change memory, but not by the formula -> the reason, and what to do."""


def estimate(
    model: PlannedModel,
    strategies: Sequence[Strategy],
    precision: Precision,
    rank: int | None = None,
    memory_gib: float | None = None,
) -> Report:
    """The numbers of the report, as plain values. rank: default: the one that holds most.
    memory_gib: memory of a GPU, with which the report also says if the peak fits."""
    if rank is None:
        rank = model.fullest_rank
    found_by_strategy: dict[str, Any] = {}
    for strategy in strategies:
        held = model.bytes_held(strategy, precision, rank)
        found: dict[str, Any] = {
            "bytes": held,
            "between_steps": bytes_between_steps(held),
            "peak": most_bytes(held),
        }
        if model.budget:
            kept = model.kept(strategy, precision)
            found["kept"] = {"weights": kept.weights, "gradients": kept.grads, "bytes": kept.nbytes}
        if memory_gib is not None:
            found["fits"] = found["peak"] <= memory_gib * GIB
        found_by_strategy[strategy.name] = found
    return {"num_shards": model.num_ranks, "rank": rank, "strategies": found_by_strategy}


def make_parser() -> Parser:
    """The parser of `estimate`."""
    parser = base_parser("estimate", __doc__, argument_default=argparse.SUPPRESS, usage=USAGE)
    add_arguments(parser)
    add_flags(parser.add_argument_group("run"), RUN)
    parser.not_modeled = {flag(name): reason for name, reason in NOT_MODELED.items()}
    return parser


def _dtype_name(options: Mapping[str, Any], has_file: bool) -> str:
    """The compute dtype that the options name. Without one it is fp32, Megatron's default, for a
    preset file, and bf16 for flags. Raises ValueError if two are named, or an unknown one."""
    if "params_dtype" in options:
        dtype = str(options["params_dtype"])
        if dtype not in DTYPES:
            raise ValueError(f"--params-dtype {dtype!r} is unknown. Use one of {list(DTYPES)}")
        return dtype
    named = [name for name in ("bf16", "fp16") if options.get(name)]
    if len(named) == 2:
        raise ValueError("--bf16 and --fp16 are both set. Leave one of them out")
    if named:
        return named[0]
    if has_file:
        return "fp32"
    return "bf16"


def _check(given: argparse.Namespace) -> None:
    """Raises ValueError for a number outside its range."""
    size = given.data_parallel_size
    rank = given.rank
    memory = given.memory_gib
    budget = vars(given).get(BUDGET, 0.0)
    numel = vars(given).get(UNIT_NUMEL, 0)
    if not 1 <= size <= MOST_RANKS:
        raise ValueError(f"--data-parallel-size {size} must be from 1 to {MOST_RANKS:,}")
    if rank is not None and not 0 <= rank < size:
        raise ValueError(
            f"--rank {rank} must be from 0 to {size - 1} with --data-parallel-size {size}"
        )
    if budget == AUTO:
        raise ValueError(
            f"{flag(BUDGET)} {AUTO}: depends on the memory that a run leaves. Give the number of "
            "GiB that the run has printed"
        )
    if not 0 <= budget < math.inf:
        raise ValueError(f"{flag(BUDGET)} {budget} must be 0 or more")
    if numel < 0:
        raise ValueError(f"{flag(UNIT_NUMEL)} {numel} must be 0 or more")
    if memory is not None and not memory > 0:
        raise ValueError(f"--memory-gib {memory} must be above 0")


def _replicas(given: argparse.Namespace, ranks: Mapping[str, int]) -> dict[str, Replicas]:
    """The replicas of each kind of parameters. ranks: by kind, how many have the same parameters.
    Raises ValueError for numbers that do not divide these."""
    values = {INSTANCES: 1, OUTER: "no_shard", **vars(given)}
    values = {EXPERT_INSTANCES: values[INSTANCES], EXPERT_OUTER: values[OUTER], **values}
    options = {DENSE: (INSTANCES, OUTER), EXPERT: (EXPERT_INSTANCES, EXPERT_OUTER)}
    found = {}
    for kind, (option, outer) in options.items():
        count = values[option]
        if count < 1 or ranks[kind] % count:
            raise ValueError(
                f"{flag(option)} {count}: must divide the {ranks[kind]} ranks that have the same "
                f"{kind} parameters"
            )
        found[kind] = Replicas(count, OUTER_STRATEGIES[values[outer]])
    return found


def _remarks(
    given: Mapping[str, Any],
    quantized: Quantization,
    spec: ModelSpec,
    ranks: Mapping[str, int],
    replicas: Mapping[str, Replicas],
) -> list[str]:
    """Lines about options that do less than one may expect. ranks: by kind, as `_replicas` has
    them."""
    found = []
    kinds = (DENSE, EXPERT) if spec.num_experts else (DENSE,)
    for kind in kinds:
        count = replicas[kind].count
        if ranks[kind] // count > 1 or ranks[DENSE] == 1:
            continue
        line = f"unsharded on one rank: {kind} parameters"
        if count > 1:
            option = EXPERT_INSTANCES if kind == EXPERT else INSTANCES
            line += (
                f", because {count} replicas share the {count} ranks that have the same ones. "
                f"{flag(option)} 1 shards them over these ranks"
            )
        found.append(line)
    if given.get("recompute_granularity") and quantized.products is None:
        found.append(
            "--recompute-granularity changes no number here, because activations are not counted. "
            "`plan` counts them"
        )
    return found


def _parallel(spec: ModelSpec, options: Mapping[str, Any], size: int) -> Parallel:
    """The model-parallel sizes. Raises ValueError for sizes into which Megatron cannot split."""
    tensor = options.get(TENSOR_RANKS) or 1
    pipeline = options.get(PIPELINE_RANKS) or 1
    parallel = Parallel(tensor, pipeline, expert=options.get(EXPERT_RANKS) or 1)
    if pipeline > spec.num_layers:
        raise ValueError(
            f"{flag(PIPELINE_RANKS)} {pipeline}: must be at most --num-layers {spec.num_layers}"
        )
    if (tensor, pipeline) != (1, 1):
        ranks = tensor * pipeline * size
        problems = split_problems(spec, replace(parallel, expert=1), ranks, 1, size)
        if problems:
            raise ValueError(problems[0])
    return parallel


def run(given: argparse.Namespace) -> Report:
    """The whole report of the command. Raises ValueError or FileNotFoundError for bad input."""
    _check(given)
    values = vars(given)
    options = options_from(values)
    if options.get(GATHER_PARTS):  # of a file
        raise ValueError(f"{flag(GATHER_PARTS)}: {NOT_MODELED[GATHER_PARTS]}")
    dtype = _dtype_name(options, "config" in given)
    quantized = quantization(options, dtype)
    spec = from_options(options, name_of(values))
    if spec.num_layers > MOST_LAYERS:
        raise ValueError(f"--num-layers {spec.num_layers} must be at most {MOST_LAYERS:,}")
    size = given.data_parallel_size
    parallel = _parallel(spec, options, size)
    # Tensor parallelism does not split experts: its ranks hold others, or shards of the same.
    ranks_of_stage = size * parallel.tensor
    if ranks_of_stage % parallel.expert or (spec.num_experts or 1) % parallel.expert:
        raise ValueError(
            f"{flag(EXPERT_RANKS)} {parallel.expert}: must divide the {ranks_of_stage} tensor and "
            f"data-parallel ranks and --num-experts {spec.num_experts}"
        )
    stage = fullest_stage(spec, parallel)
    expert_ranks = ranks_of_stage // parallel.expert
    ranks = {DENSE: size, EXPERT: expert_ranks}
    replicas = _replicas(given, ranks)
    numel = ddp_options.unit_numel(given, given, layer_numels(spec, parallel, stage))
    units = planned_units(
        spec,
        replicas[DENSE].shards(size),
        replicas[EXPERT].shards(expert_ranks),
        DTYPES[dtype],
        form=quantized.weights,
        unit_numel=numel,
        fused=not is_on(given, UNFUSED),
        split=parallel,
        stage=stage,
    )
    budget = int(values.get(BUDGET, 0.0) * GIB)
    ahead = values.get(UNIT_NUMEL, 0)
    of_experts = STRATEGIES.get(values.get(EXPERT_STRATEGY, ""))
    model = PlannedModel(units, slots_wanted(given), quantized, budget, ahead, of_experts, replicas)
    strategies = list(STRATEGIES.values())
    chosen = values.get("data_parallel_sharding_strategy")
    if chosen:
        strategies = [STRATEGIES[chosen]]
    report = estimate(model, strategies, precision(values), given.rank, given.memory_gib)
    report["params_dtype"] = dtype
    report["quantized"] = quantized.name
    report["experts"] = of_experts and of_experts.name
    report["replicas"] = {kind: one.count for kind, one in replicas.items()}
    report["parameters"] = spec.num_parameters
    report["split"] = {
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "expert": parallel.expert,
        "stage": stage,
    }
    report["not_counted"] = list(spec.left_out)
    report["remarks"] = _remarks(options, quantized, spec, ranks, replicas)
    return report


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status, 2 for bad input."""
    given = make_parser().parse_args(argv)

    def as_text(report: Report) -> str:
        return render(report, given.memory_gib)

    return 2 if answer(given, "estimate", lambda _: run(given), as_text) is None else 0
