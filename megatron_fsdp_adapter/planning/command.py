"""`plan`: the fastest configurations, their speed and memory, on 1 to 16,384 GPUs.

    plan --preset llama3-8b --gpus 8 --gpu h100 --global-batch-size 128
    plan --hf-config model/config.json --gpus 64 --gpu h200 --global-batch-size 512 --explain
    plan --preset llama3-70b --global-batch-size 2048 --curve 64,128,256,512,1024 --gpu gb200

No GPU and no weights are needed. docs/plan.md lists what is modeled, and prediction errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.models import quantization
from megatron_fsdp_adapter.models.sources import (
    MEANINGS,
    PRESETS,
    from_hugging_face,
    from_options,
    model_named,
    read_options,
)
from megatron_fsdp_adapter.models.spec import ModelSpec, flag, layers_of

from . import report
from .features import UNMODELED, features_of
from .machine import GPUS, NETWORKS, machine_named
from .search import Plan, Wanted, plan

FIXED = {
    "data_parallel_sharding_strategy": ("strategy", str),
    "num_distributed_optimizer_instances": ("instances", int),
    "micro_batch_size": ("microbatch", int),
    "tensor_model_parallel_size": ("tensor", int),
    "pipeline_model_parallel_size": ("pipeline", int),
    "expert_model_parallel_size": ("expert", int),
}
"""Option that fixes a field of a configuration -> the field, and its type."""

MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "vocab_size", "seq_length", "num_experts", "moe_router_topk",
    "moe_ffn_hidden_size",
)  # fmt: skip


CURVE_TRIES = 4
"""Configurations that are simulated for each point of a curve."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_fsdp_adapter plan", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    model = parser.add_argument_group("model (a flag overrides the rest)")
    model.add_argument("--preset", choices=sorted(PRESETS), help="a known model")
    model.add_argument("--config", metavar="FILE", help="YAML with Megatron's flag names as keys")
    model.add_argument("--hf-config", metavar="FILE",
                       help="config.json of a Hugging Face model, or its folder")  # fmt: skip
    for name in MODEL:
        model.add_argument(flag(name), type=int, metavar="N", help=MEANINGS[name])
    run = parser.add_argument_group("run")
    run.add_argument("--gpus", type=int, default=8, metavar="N",
                     help="number of GPUs; default: %(default)s")  # fmt: skip
    run.add_argument("--gpu", default="h200", choices=sorted(GPUS),
                     help="kind of GPU; default: %(default)s")  # fmt: skip
    run.add_argument("--network", choices=sorted(NETWORKS), help="default: that of the GPU")
    run.add_argument("--memory-gib", type=float, help="of a GPU; default: that of the GPU")
    run.add_argument("--global-batch-size", type=int, default=None, metavar="N",
                     help="sequences; default 16 a GPU")  # fmt: skip
    run.add_argument("--bf16-wire", action="store_true",
                     help="also plan bf16 gradients on the wire, summed in fp32")  # fmt: skip
    run.add_argument("--tries", type=int, default=10, help="configurations that are simulated")
    run.add_argument("--top", type=int, default=5, help="configurations shown")
    for name, (field, kind) in FIXED.items():
        choices = list(STRATEGIES) if field == "strategy" else None
        run.add_argument(flag(name), type=kind, choices=choices, help="fixed; default: planned")
    _add_features(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print the plan as JSON")
    out.add_argument("--explain", action="store_true", help="list a step's operations")
    out.add_argument("--plot", metavar="FILE", help="plot a step, or the curve")
    out.add_argument("--curve", metavar="N,N,...", help="the best for each number of GPUs")
    return parser


def _add_features(parser: argparse.ArgumentParser) -> None:
    told = parser.add_argument_group("features (fixed, not searched)")
    for name, text in quantization.STRINGS.items():
        if name.startswith("fp8"):
            told.add_argument(flag(name), metavar="NAME", help=text)
    told.add_argument("--fp8-param-gather", action="store_true",
                      help=quantization.SWITCHES["fp8_param_gather"])  # fmt: skip
    told.add_argument("--fsdp-unsharded-budget-gib", type=float, default=0.0, metavar="GIB",
                      help="for units that stay unsharded over a step")  # fmt: skip
    told.add_argument("--suggested-communication-unit-size", type=int, metavar="N",
                      help=(
                          "elements up to which neighboring layers are grouped into one unit; 0: "
                          "each layer is one; default: the wrapper's"
                      ))  # fmt: skip
    for name, what in UNMODELED.items():
        told.add_argument(flag(name), nargs="?", const=True, help=f"not modeled: {what}")
    told.add_argument("--cuda-graph-impl", choices=["local"],
                      help="layer graphs; full-iteration graphs are searched")  # fmt: skip


def model_of(given: argparse.Namespace) -> ModelSpec:
    """The model by the options. Raises ValueError or FileNotFoundError for bad input."""
    named = [name for name in ("preset", "config", "hf_config") if getattr(given, name)]
    if len(named) > 1:
        raise ValueError(f"{', '.join(map(flag, named))}: mutually exclusive. Give one of them")
    chosen = {name: getattr(given, name) for name in MODEL if getattr(given, name) is not None}
    if given.preset:
        return _overridden(model_named(given.preset), chosen)
    if given.hf_config:
        return _overridden(from_hugging_face(given.hf_config), chosen)
    options = read_options(given.config) if given.config else {}
    return from_options({**options, **chosen}, given.config or "the model")


def _overridden(spec: ModelSpec, chosen: Mapping[str, Any]) -> ModelSpec:
    layers, seq = chosen.get("num_layers"), chosen.get("seq_length")
    others = sorted(set(chosen) - {"num_layers", "seq_length"})
    if others:
        raise ValueError(
            f"{', '.join(map(flag, others))}: defined by the preset or Hugging Face config, of "
            "which only --num-layers and --seq-length can be changed. Give all sizes by flags "
            "instead"
        )
    if layers:
        spec = replace(spec, name=f"{spec.name}, {layers} layers", num_layers=layers)
    return replace(spec, seq_length=seq or spec.tokens)


def wanted_of(given: argparse.Namespace, gpus: int) -> Wanted:
    machine = machine_named(given.gpu, given.network)
    fixed = {
        field: getattr(given, name) for name, (field, _) in FIXED.items()
        if getattr(given, name) is not None
    }  # fmt: skip
    batch = given.global_batch_size or 16 * gpus
    return Wanted(
        model_of(given), machine, gpus, batch, given.memory_gib or machine.gpu.memory_gib, fixed,
        given.tries, features_of(vars(given)), given.bf16_wire,
    )  # fmt: skip


def _numbers(text: str) -> list[int]:
    """Numbers of GPUs, from comma-separated text."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(
            f"{text!r}: not a list of numbers. Write numbers of GPUs, e.g. --curve 8,16,32"
        ) from error


def run(given: argparse.Namespace) -> str:
    """The output of the command. Raises ValueError, FileNotFoundError or RuntimeError for bad
    input."""
    if given.plot:
        from .plot import check_matplotlib

        check_matplotlib()
    if given.curve:
        return _curve(given, _numbers(given.curve))
    found = plan(wanted_of(given, given.gpus))
    if given.plot:
        from .plot import plot_step

        plot_step(found.wanted, found.predictions[0], given.plot)
    if given.json:
        return json.dumps(report.plain(found, given.top), indent=2)
    text = report.render(found, given.top)
    timeline = found.predictions[0].timeline
    if given.explain and timeline is not None:
        stage = layers_of(found.wanted.spec, found.predictions[0].configuration.parallel, 0)
        text += "\n\n" + report.explain(timeline, len(stage))
    return text


def _curve(given: argparse.Namespace, sizes: Sequence[int]) -> str:
    plans: list[tuple[int, Plan | str]] = []
    for gpus in sizes:
        try:
            wanted = wanted_of(given, gpus)
            plans.append((gpus, plan(replace(wanted, tries=min(wanted.tries, CURVE_TRIES)))))
        except ValueError as error:
            plans.append((gpus, str(error)))
    if given.plot:
        from .plot import plot_curve

        known = [(one.wanted, one.predictions[0]) for _, one in plans if isinstance(one, Plan)]
        plot_curve(known, given.plot)
    if given.json:
        return json.dumps([
            report.plain(one, 1) if isinstance(one, Plan) else {"gpus": gpus, "error": one}
            for gpus, one in plans
        ], indent=2)  # fmt: skip
    rows: list[tuple[str, ...]] = [
        ("GPUs", "ms/step", "tok/s/GPU", "MFU", "peak GiB", "limited by", "configuration")
    ]
    for gpus, one in plans:
        if isinstance(one, str):
            rows.append((str(gpus), "-", "-", "-", "-", "-", one))
            continue
        best = one.predictions[0]
        rows.append((
            str(gpus), f"{best.ms:,.0f}", f"{best.tokens_per_gpu:,.0f}", f"{best.mfu:.1%}",
            f"{best.peak_bytes / 2**30:.1f}", best.limit, best.configuration.name,
        ))  # fmt: skip
    return "\n".join(report.aligned(rows))


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status, 2 for bad input."""
    try:
        print(run(make_parser().parse_args(argv)))
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0
