"""`estimate`: bytes per rank by kind of buffer and strategy, from a model configuration alone.

No GPU, no process group, no weights: the listing of parameters is planned as the engine plans it,
and the closed formula of `memory.py` is applied to the layouts. Activations, temporary tensors of
kernels and the CUDA context are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_fsdp_adapter.core.config import STRATEGIES, Strategy
from megatron_fsdp_adapter.diagnostics.memory import (
    Precision,
    bytes_between_steps,
    most_bytes,
)
from megatron_fsdp_adapter.megatron.options.rules import is_on
from megatron_fsdp_adapter.megatron.options.staging_options import NO_SLOTS, slots_wanted
from megatron_fsdp_adapter.megatron.options.table import UNIT_NUMEL
from megatron_fsdp_adapter.megatron.options.unit_grouping import joins_by_default
from megatron_fsdp_adapter.models import quantization as quantized_options
from megatron_fsdp_adapter.models.quantization import PLAIN, Quantization, quantization
from megatron_fsdp_adapter.models.sources import (
    MEANINGS,
    PRESETS,
    dense_model,
    options_from,
)
from megatron_fsdp_adapter.models.spec import TRAINING_TOKENIZER, ModelSpec, flag, listing
from megatron_fsdp_adapter.planning.planned import PlannedModel, plan_units
from megatron_fsdp_adapter.sharding.unsharded_budget import GIB
from megatron_fsdp_adapter.sharding.unsharded_budget import OPTION as BUDGET

from .estimate_text import render, unit_rows
from .precision_options import (
    MOMENTS,
    POLICY_DTYPES,
    POLICY_OPTIONS,
    SWITCHES,
    UNFUSED,
    matrices_of_muon,
    precision,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


_INTEGERS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by",
    "max_position_embeddings", "seq_length",
)  # fmt: skip
_SWITCHES = (
    "group_query_attention", "swiglu", "add_qkv_bias", "qk_layernorm",
    "untie_embeddings_and_output_weights",
)  # fmt: skip
_STRINGS = ("normalization", "position_embedding_type", "tokenizer_type")


def plan_model(
    spec: ModelSpec,
    num_shards: int,
    dtype: torch.dtype,
    slots: Mapping[str, Any] = NO_SLOTS,
    quantized: Quantization = PLAIN,
    budget: int = 0,
    unit_numel: int | None = None,
    **planner: Any,
) -> PlannedModel:
    """The plan of a model on `num_shards` ranks.

    unit_numel: elements up to which layers are grouped into units and prefetched (None: the
    default); planner: options of `plan_units`; the rest: see `PlannedModel`. Raises ValueError for
    weights that cannot be represented in their format."""
    rows = [(unit, fqn, shape, num_shards) for unit, fqn, shape, _ in listing(spec)]
    units = plan_units(rows, dtype, quantized.weights, unit_numel, **planner)
    return PlannedModel(units, slots, quantized, budget, unit_numel or 0)


def bytes_held(
    model: PlannedModel, strategy: Strategy, precision: Precision, rank: int
) -> dict[str, int]:
    """Bytes by kind on `rank`, including Muon's matrices in its step."""
    held = model.bytes_held(strategy, precision, rank)
    return held | matrices_of_muon(model.layouts, precision)


def most_layers(
    of_layers: Callable[[int], PlannedModel], strategy: Strategy, precision: Precision, rank: int,
    limit: int,
) -> int:
    """The largest number of transformer layers whose state always fits in `limit` bytes. of_layers:
    number of layers -> planned model."""

    def needed(num_layers: int) -> int:
        return most_bytes(bytes_held(of_layers(num_layers), strategy, precision, rank))

    # Every layer adds at least a shard of weights, gradients and state, so this is an upper bound.
    each = max(unit.layers for unit in of_layers(3).units)
    upper = limit * each // max(1, needed(3 + each) - needed(3)) + 3 + each
    return bisect_right(range(1, upper), limit, key=needed)


def estimate(
    of_layers: Callable[[int | None], PlannedModel],
    strategies: Sequence[Strategy],
    precision: Precision,
    rank: int | None = None,
    memory_gib: float | None = None,
) -> dict[str, Any]:
    """The report as plain values. of_layers: number of layers (None: the model's) -> planned model;
    rank: default: the one that holds most."""
    model = of_layers(None)
    rank = model.fullest_rank if rank is None else rank
    report: dict[str, Any] = {
        "parameters": model.num_parameters,
        "num_shards": model.num_shards,
        "rank": rank,
        "units": unit_rows(model.planned),
        "strategies": {},
    }
    for strategy in strategies:
        held = bytes_held(model, strategy, precision, rank)
        found: dict[str, Any] = {
            "bytes": held,
            "between_steps": bytes_between_steps(held),
            "gathered_ahead": model.gathered_ahead(strategy, precision),
            "peak": most_bytes(held),
        }
        if model.budget:
            kept = model.kept(strategy, precision)
            found["kept"] = {"weights": kept.weights, "gradients": kept.grads, "bytes": kept.nbytes}
        if memory_gib is not None:
            limit = int(memory_gib * GIB)
            found["fits"] = found["peak"] <= limit
            found["most_layers"] = most_layers(of_layers, strategy, precision, rank, limit)
        report["strategies"][strategy.name] = found
    return report


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_fsdp_adapter estimate",
        description="Bytes per rank by kind of buffer, from a dense GPT's configuration alone.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model (Megatron's flags; a flag overrides the files)")
    model.add_argument("--preset", choices=sorted(PRESETS), help="a known model")
    model.add_argument("--config", metavar="FILE", help="YAML with Megatron's flag names as keys")
    model.add_argument("--hf-config", metavar="FILE",
                       help="config.json of a Hugging Face model, or its folder")
    for name in _INTEGERS:
        model.add_argument(flag(name), type=int, metavar="N", help=MEANINGS[name])
    for name in _SWITCHES:
        model.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=MEANINGS[name])
    for name in _STRINGS:
        model.add_argument(flag(name), help=MEANINGS[name])
    for name, value in (("add", True), ("disable", False)):
        model.add_argument(f"--{name}-bias-linear", dest="add_bias_linear", action="store_const",
                           const=value, help=f"{name} biases")  # fmt: skip
    run = parser.add_argument_group("run")
    run.add_argument("--data-parallel-size", type=int, default=1, metavar="N", help="shards")
    run.add_argument(
        "--data-parallel-sharding-strategy", choices=list(STRATEGIES), help="default: all"
    )
    run.add_argument(
        "--params-dtype", choices=list(DTYPES), help="default: that of --config, else bf16"
    )
    for option, meaning in POLICY_OPTIONS.items():
        run.add_argument(flag(option), choices=list(POLICY_DTYPES), help=meaning)
    for option, meaning in quantized_options.STRINGS.items():
        run.add_argument(flag(option), help=meaning)
    switches = {**SWITCHES, **quantized_options.SWITCHES}
    for option, meaning in switches.items():
        run.add_argument(flag(option), action="store_true", help=meaning)
    run.add_argument(
        flag(BUDGET), type=float, help="GiB for weights and gradients unsharded over a step"
    )
    run.add_argument(flag(UNIT_NUMEL), type=int, help=(
        "elements up to which layers are grouped into one unit; 0: each layer is one; default: "
        "the wrapper's"
    ))
    run.add_argument("--optimizer", choices=("adam", *sorted(MOMENTS)),
                     help="adam, or an optimizer for matrices only")
    run.add_argument("--rank", type=int, default=None, help="default: the rank that holds most")
    run.add_argument("--memory-gib", type=float, default=None, help="report what fits in it")
    run.add_argument("--padding-bound", type=float, default=0.01, help="see docs/layout.md")
    run.add_argument("--max-segments", type=int, default=4, help="see docs/layout.md")
    run.add_argument("--json", action="store_true", default=False, help="print it as JSON")
    return parser


def _model_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Preset or Hugging Face config, then file, then flags; the later wins.

    A training preset without vocabulary options means the training script's default.
    """
    options = {**options_from(given), **given}
    vocabulary = ("vocab_size", "padded_vocab_size", "tokenizer_type")
    if "config" in given and all(options.get(name) is None for name in vocabulary):
        options["tokenizer_type"] = TRAINING_TOKENIZER
    return options


def _dtype_name(options: Mapping[str, Any]) -> str:
    if "params_dtype" in options:
        return str(options["params_dtype"])
    named = [name for name in ("bf16", "fp16") if options.get(name)]
    if len(named) == 2:
        raise ValueError("--bf16 and --fp16 are both set. Leave one of them out")
    return named[0] if named else "fp32" if "config" in options else "bf16"


def _check(given: argparse.Namespace) -> None:
    if given.data_parallel_size < 1:
        raise ValueError(f"--data-parallel-size {given.data_parallel_size} must be at least 1")
    if given.rank is not None and not 0 <= given.rank < given.data_parallel_size:
        raise ValueError(
            f"--rank {given.rank} must be from 0 to {given.data_parallel_size - 1} with "
            f"--data-parallel-size {given.data_parallel_size}"
        )
    budget = vars(given).get(BUDGET, 0.0)
    if not (math.isfinite(budget) and budget >= 0):
        raise ValueError(f"{flag(BUDGET)} {budget} must be 0 or more")
    if vars(given).get(UNIT_NUMEL, 0) < 0:
        raise ValueError(f"{flag(UNIT_NUMEL)} {vars(given)[UNIT_NUMEL]} must be 0 or more")
    if given.memory_gib is not None and not given.memory_gib > 0:
        raise ValueError(f"--memory-gib {given.memory_gib} must be above 0")


def run(given: argparse.Namespace) -> str:
    """The output of the command. Raises ValueError or FileNotFoundError for bad input."""
    _check(given)
    options = _model_options(vars(given))
    dtype = _dtype_name(options)
    if dtype not in DTYPES:
        raise ValueError(f"--params-dtype {dtype!r} is unknown. Use one of {list(DTYPES)}")
    quantized = quantization(options, dtype)
    spec = dense_model(options)
    joined = vars(given).get(UNIT_NUMEL, None if joins_by_default(given, given) else 0)

    def of_layers(count: int | None) -> PlannedModel:
        return plan_model(
            spec if count is None else replace(spec, num_layers=count),
            given.data_parallel_size, DTYPES[dtype], slots_wanted(given), quantized,
            int(vars(given).get(BUDGET, 0.0) * GIB), joined,
            fused=not is_on(given, UNFUSED), padding_bound=given.padding_bound,
            max_segments=given.max_segments,
        )  # fmt: skip

    chosen = vars(given).get("data_parallel_sharding_strategy")
    strategies = [STRATEGIES[chosen]] if chosen else list(STRATEGIES.values())
    report = estimate(of_layers, strategies, precision(vars(given)), given.rank, given.memory_gib)
    report["params_dtype"] = dtype
    report["quantized"] = quantized.name
    if given.json:
        return json.dumps(report, indent=2)
    described = f"{dtype} compute weights" + (f", {quantized.name}" if quantized.name else "")
    return render(report, described, given.memory_gib)


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status, 2 for bad input."""
    try:
        print(run(make_parser().parse_args(argv)))
    except (ValueError, FileNotFoundError) as error:
        print(f"estimate: {error}", file=sys.stderr)
        return 2
    return 0
