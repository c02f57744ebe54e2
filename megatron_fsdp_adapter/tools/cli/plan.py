"""Finds the fastest configurations, their speed and memory, on 1 to 16,384 GPUs.

    plan --preset llama3-8b --gpus 8 --gpu h100 --global-batch-size 128
    plan --hf-config model/config.json --gpus 64 --gpu h200 --global-batch-size 512

No GPU and no weights are needed. docs/plan.md lists what is modeled, and prediction errors.

Exit status: 0, or 2 for bad input, or if no configuration fits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_fsdp_adapter.checkpoint.digests import Progress, silent
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.megatron.options.table import EXPERT_INSTANCES, EXPERT_STRATEGY
from megatron_fsdp_adapter.tools.models.sources import (
    Flags,
    add_arguments,
    add_flags,
    from_options,
    name_of,
    options_from,
)
from megatron_fsdp_adapter.tools.models.spec import flag
from megatron_fsdp_adapter.tools.planning import report
from megatron_fsdp_adapter.tools.planning.machine import GPUS, NETWORKS, machine_named
from megatron_fsdp_adapter.tools.planning.search import Plan, Request, plan

from .output import answer
from .parser import USAGE, base_parser

MOST_GPUS = 16_384

FIXED = {
    "data_parallel_sharding_strategy": ("strategy", str),
    "num_distributed_optimizer_instances": ("instances", int),
    EXPERT_STRATEGY: ("expert_strategy", str),
    EXPERT_INSTANCES: ("expert_instances", int),
    "micro_batch_size": ("microbatch", int),
    "tensor_model_parallel_size": ("tensor", int),
    "pipeline_model_parallel_size": ("pipeline", int),
    "expert_model_parallel_size": ("expert", int),
}
"""Option that fixes a field of a configuration -> the field, and its type."""


def _fixing(field: str, kind: type) -> dict[str, Any]:
    """The arguments of `add_argument` for an option of `FIXED`."""
    default = "as dense parameters" if field.startswith("expert_") else "the plan chooses"
    return {
        "type": kind,
        "choices": list(STRATEGIES) if kind is str else None,
        "metavar": "N" if kind is int else None,
        "help": f"fixes this option; default: {default}",
    }


RUN: Flags = {
    "gpus": {
        "type": int,
        "default": 8,
        "metavar": "N",
        "help": "number of GPUs; default: %(default)s",
    },
    "gpu": {
        "default": "h200",
        "choices": sorted(GPUS),
        "help": "kind of GPU; default: %(default)s",
    },
    "network": {
        "choices": sorted(NETWORKS),
        "help": "links between GPUs; default: those of the kind of GPU",
    },
    "memory_gib": {
        "type": float,
        "metavar": "GIB",
        "help": "memory of a GPU; default: that of the kind of GPU",
    },
    "global_batch_size": {"type": int, "metavar": "N", "help": "sequences; default: 16 per GPU"},
    "tries": {
        "type": int,
        "default": 10,
        "metavar": "N",
        "help": "configurations that are simulated; default: %(default)s",
    },
    "top": {
        "type": int,
        "default": 5,
        "metavar": "N",
        "help": "configurations that are shown; default: %(default)s",
    },
    **{name: _fixing(field, kind) for name, (field, kind) in FIXED.items()},
}
"""Options beside those of the model."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of `plan`."""
    parser = base_parser("plan", __doc__, usage=USAGE)
    add_arguments(parser)
    add_flags(parser.add_argument_group("run"), RUN)
    return parser


def run(given: argparse.Namespace, progress: Progress = silent) -> Plan:
    """The plan by the options. Raises ValueError or FileNotFoundError for bad input."""
    options = vars(given)
    if not 1 <= given.gpus <= MOST_GPUS:
        raise ValueError(f"--gpus {given.gpus}: must be from 1 to {MOST_GPUS:,}")
    machine = machine_named(given.gpu, given.network)
    fixed = {}
    for name, (field, _) in FIXED.items():
        value = options[name]
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{flag(name)} {value}: must be at least 1")
        if value is not None:
            fixed[field] = value
    wanted = Request(
        from_options(options_from(options), name_of(options)),
        machine,
        gpus=given.gpus,
        global_batch=given.global_batch_size or 16 * given.gpus,
        memory_gib=given.memory_gib or machine.gpu.memory_gib,
        fixed=fixed,
        tries=given.tries,
    )
    return plan(wanted, progress)


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status, 2 for bad input."""
    given = make_parser().parse_args(argv)
    found = answer(
        given,
        "plan",
        lambda progress: run(given, progress),
        lambda one: report.render(one, given.top),
        lambda one: report.plain(one, given.top),
        "configuration",
    )
    return 2 if found is None else 0
