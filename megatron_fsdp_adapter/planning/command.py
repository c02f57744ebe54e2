"""`plan`: the fastest configurations, their speed and memory, on 1 to 16,384 GPUs.

    plan --preset llama3-8b --gpus 8 --gpu h100 --global-batch-size 128
    plan --hf-config model/config.json --gpus 64 --gpu h200 --global-batch-size 512

No GPU and no weights are needed. docs/plan.md lists what is modeled, and prediction errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.models.quantization import STRINGS, SWITCHES, quantization
from megatron_fsdp_adapter.models.sources import (
    add_arguments,
    from_options,
    name_of,
    options_from,
)
from megatron_fsdp_adapter.models.spec import flag

from . import report
from .machine import GPUS, NETWORKS, machine_named
from .search import Wanted, plan

FIXED = {
    "data_parallel_sharding_strategy": ("strategy", str),
    "num_distributed_optimizer_instances": ("instances", int),
    "micro_batch_size": ("microbatch", int),
    "tensor_model_parallel_size": ("tensor", int),
    "pipeline_model_parallel_size": ("pipeline", int),
    "expert_model_parallel_size": ("expert", int),
}
"""Option that fixes a field of a configuration -> the field, and its type."""

UNMODELED = {
    "tp_comm_overlap": (
        "tensor-parallel communication beside GEMMs: a plan would overestimate the time"
    ),
    "optimizer_cpu_offload": "an optimizer on the host; `estimate` counts its memory",
    "chunked_optimizer_state_offload": "a streamed optimizer; `estimate` counts its memory",
    "overlap_moe_expert_parallel_comm": (
        "exchanges between experts beside another microbatch: a plan would overestimate the time"
    ),
    "cpu_offloading": "activations in host memory",
    "fp4_format": "FP4 GEMMs and weights: there are no measurements",
    "cuda_graph_modules": (
        "graphs of parts of layers; graphs of layers and of an iteration are planned"
    ),
    "fsdp_unsharded_budget_gib": "units that stay unsharded; `estimate` counts their memory",
    "suggested_communication_unit_size": (
        "layers in units of another size than the default; `estimate` counts their memory"
    ),
}
"""Options that are not modeled, and what they do."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_fsdp_adapter plan", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--gpus", type=int, default=8, metavar="N",
                     help="number of GPUs; default: %(default)s")  # fmt: skip
    run.add_argument("--gpu", default="h200", choices=sorted(GPUS),
                     help="kind of GPU; default: %(default)s")  # fmt: skip
    run.add_argument("--network", choices=sorted(NETWORKS), help="default: that of the GPU")
    run.add_argument("--memory-gib", type=float, help="of a GPU; default: that of the GPU")
    run.add_argument("--global-batch-size", type=int, default=None, metavar="N",
                     help="sequences; default 16 a GPU")  # fmt: skip
    run.add_argument("--tries", type=int, default=10, help="configurations that are simulated")
    run.add_argument("--top", type=int, default=5, help="configurations shown")
    for name, (field, kind) in FIXED.items():
        choices = list(STRATEGIES) if field == "strategy" else None
        run.add_argument(flag(name), type=kind, choices=choices, help="fixed; default: planned")
    _add_features(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def _add_features(parser: argparse.ArgumentParser) -> None:
    told = parser.add_argument_group("features (fixed, not searched)")
    for name, text in STRINGS.items():
        if name.startswith("fp8"):
            told.add_argument(flag(name), metavar="NAME", help=text)
    told.add_argument("--fp8-param-gather", action="store_true",
                      help=SWITCHES["fp8_param_gather"])  # fmt: skip
    told.add_argument("--megatron-fsdp-grad-comm-dtype", choices=("fp32", "bf16"),
                      help="gradients on the wire; bf16 ones are summed in fp32")  # fmt: skip
    for name, what in UNMODELED.items():
        told.add_argument(flag(name), nargs="?", const=True, help=f"not modeled: {what}")
    told.add_argument("--cuda-graph-impl", choices=["local"],
                      help="layer graphs; full-iteration graphs are searched")  # fmt: skip


def features_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a configuration that are given, not searched. Raises ValueError for options that
    are not modeled."""
    for name, what in UNMODELED.items():
        if options.get(name) is not None:
            raise ValueError(f"{name}={options[name]!r} is not modeled: {what}. Leave it out")
    return {
        "quantized": quantization(options, "bf16"),
        "bf16_wire": options.get("megatron_fsdp_grad_comm_dtype") == "bf16",
        "layer_graphs": options.get("cuda_graph_impl") == "local",
    }


def run(given: argparse.Namespace) -> str:
    """The output of the command. Raises ValueError, FileNotFoundError or RuntimeError for bad
    input."""
    options, machine = vars(given), machine_named(given.gpu, given.network)
    fixed = {
        field: options[name] for name, (field, _) in FIXED.items() if options[name] is not None
    }
    found = plan(Wanted(
        from_options(options_from(options), name_of(options)), machine, given.gpus,
        given.global_batch_size or 16 * given.gpus, given.memory_gib or machine.gpu.memory_gib,
        fixed, given.tries, features_of(options),
    ))  # fmt: skip
    if given.json:
        return json.dumps(report.plain(found, given.top), indent=2)
    return report.render(found, given.top)


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status, 2 for bad input."""
    try:
        print(run(make_parser().parse_args(argv)))
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0
