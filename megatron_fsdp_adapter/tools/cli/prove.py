"""`doctor --prove`: trains a scaled-down configuration on this machine and compares the
results with those of Megatron's DDP.

    doctor --prove path/to/pretrain_gpt.py --use-megatron-fsdp ...
    doctor --prove --config configs/llama-1.5b.yaml --set overlap_param_gather=True
    doctor --prove --preset llama3-8b --set data_parallel_sharding_strategy=optim

Exit status: 0 if all is proven, 1 if something differs, 2 if it cannot be proven.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from megatron_fsdp_adapter.tools.cli.named_options import named_options
from megatron_fsdp_adapter.tools.models import sources
from megatron_fsdp_adapter.tools.prove import report, run, source
from megatron_fsdp_adapter.tools.prove.scale_down import Room, shrink

GLOO_RANKS = 4
"""Default for `--ranks` without GPUs."""


OPTIONS: sources.Flags = {
    "prove": {"action": "store_true", "help": "train it, scaled down, and compare"},
    **sources.FILES,  # instead of a script
    "ranks": {"type": int, "metavar": "N",
              "help": f"processes at most; default: the number of GPUs, or {GLOO_RANKS} without"},
    "steps": {"type": int, "default": 3, "metavar": "N",
              "help": "steps before the save; default: %(default)s"},
    "more": {"type": int, "default": 2, "metavar": "N",
             "help": "steps after the load; default: %(default)s"},
    "keep": {"action": "append", "default": [], "metavar": "SIZE",
             "help": "a size that is not scaled down, such as hidden_size; default: none"},
    "timeout": {"type": float, "default": 900.0, "metavar": "SECONDS",
                "help": "for all ranks together; default: %(default)s"},
}  # fmt: skip


def this_room(asked: int | None) -> Room:
    """The resources of this machine for a proof. asked: ranks, default: one for each GPU, or
    `GLOO_RANKS`. Raises ValueError for more ranks than GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_te = importlib.util.find_spec("transformer_engine") is not None
    ranks = gpus or GLOO_RANKS
    if asked is not None:
        ranks = asked
    if gpus and ranks > gpus:
        raise ValueError(f"--ranks {asked}: there are {gpus} GPUs")
    return Room(ranks, bool(gpus), has_te)


def read_recipe(given: argparse.Namespace, settings: Mapping[str, Any]) -> source.Recipe:
    """The run to prove: that of the script, or of the files and `settings`. Raises ValueError or
    FileNotFoundError if there is none, or both are given."""
    files = {name: getattr(given, name) for name in sources.FILES if getattr(given, name)}
    if given.script is not None:
        if files or settings:
            raise ValueError(
                "both a script and one of --config, --hf-config, --preset and --set are given. "
                "Give one of them"
            )
        return source.of_script(given.script, given.arguments, given.world_size)
    if not files and not settings:
        raise ValueError(
            "no configuration. Give a script with its command line, --config or --preset"
        )
    options = sources.options_from({**files, **settings})
    return source.of_options(options, sources.name_of(files), given.world_size)


def main(given: argparse.Namespace) -> int:
    """Proves and prints the result. Returns 0 if all is proven, 1 if something differs or a rank
    fails, 2 if it cannot be proven."""
    try:
        if given.steps < 1 or given.more < 1:
            raise ValueError(f"--steps {given.steps}, --more {given.more}: at least 1 each")
        recipe = read_recipe(given, named_options(given.set))
        room = this_room(given.ranks)
        shrunk = shrink(recipe.options, room, frozenset(given.keep))
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"doctor --prove: {error}", file=sys.stderr)
        return 2
    if recipe.folder is not None:  # ranks import Megatron from it
        path = str(recipe.folder)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{path}{os.pathsep}{before}" if before else path
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        plan = run.ProofPlan(shrunk, Path(folder), given.steps, given.more)
        if not given.json:
            print(report.render_plan(recipe, plan), flush=True)
        try:
            rows = run.prove(plan, "nccl" if room.cuda else "gloo", given.timeout)
        except (ProcessExitedException, ProcessRaisedException) as error:
            failed = "doctor --prove: a rank failed (above), nothing is proven"
            print(f"{error}\n{failed}", file=sys.stderr)
            return 1
        if given.json:
            print(json.dumps(report.as_values(recipe, plan, rows), indent=2, default=str))
        else:
            print(*report.lines_of(plan, rows), sep="\n", flush=True)
    return 0 if all(row.holds for row in rows) else 1
