"""Checks the installation, this machine and a configuration.

Without --prove it starts no training. Under a launcher, on one node or several, the ranks compare
what they see, and the first one prints.

    doctor                                              versions, machine, environment, bindings
    doctor path/to/pretrain_gpt.py --use-megatron-fsdp ...              and this command line
    doctor --set data_parallel_sharding_strategy=optim --set ...        and these options
    doctor --prove path/to/pretrain_gpt.py --use-megatron-fsdp ...      train it, small, and compare
    torchrun --nnodes 2 ... -m megatron_fsdp_adapter doctor             on all ranks

Exit status: 0 if nothing is wrong, 1 if there are problems (with --prove: differences), 2 for bad
input (with --prove: nothing can be proven).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.comm.communicator import Communicator
from megatron_fsdp_adapter.core.runtime.launcher import is_first_rank
from megatron_fsdp_adapter.launch import megatron_lm, runner
from megatron_fsdp_adapter.megatron.checkpoint import resume_check
from megatron_fsdp_adapter.megatron.compat import releases
from megatron_fsdp_adapter.megatron.compat.table import ALL
from megatron_fsdp_adapter.megatron.options import sizes, validation
from megatron_fsdp_adapter.megatron.options.settings import Change, format_changes
from megatron_fsdp_adapter.tools.cli import machine, nodes, prove
from megatron_fsdp_adapter.tools.cli.named_options import named_options, optimizer_options
from megatron_fsdp_adapter.tools.cli.output import answer
from megatron_fsdp_adapter.tools.cli.parser import base_parser
from megatron_fsdp_adapter.tools.models import sources

from .output import Report

PACKAGES = (
    "megatron-fsdp-adapter", "megatron-core", "megatron-bridge", "transformer-engine", "torch",
    "numpy", "triton",
)  # fmt: skip


def versions() -> dict[str, dict[str, Any]]:
    """Package -> its installed version, and `tested`: True if the tests run with it."""
    found: dict[str, dict[str, Any]] = {}
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = {"version": version, "tested": releases.is_tested(name, version)}
    return found


def bindings() -> dict[str, str]:
    """`error`: why `install()` cannot rebind Megatron's names. Empty if it can."""
    try:
        from megatron_fsdp_adapter.megatron.compat.core_support import require_supported_core

        require_supported_core(ALL)
    except ModuleNotFoundError as error:
        return {
            "error": f"{error.name} is not installed: no name of Megatron can be rebound. "
            "Install megatron-core."
        }
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


def configuration(given: argparse.Namespace) -> Report | None:
    """Changes and problems for the script's command line or the options of `--set`; None if
    neither is given."""
    if given.script is None and not given.set:
        return None
    changes: list[Change] = []
    loaded = resume_check.Loaded()
    if given.script is None:
        chosen = named_options(given.set)
        plain = {**validation.PLAIN_OPTIONS, **optimizer_options()}
        args: Any = SimpleNamespace(**{**plain, **chosen})
    else:
        args = runner.parse_arguments(given.script, given.arguments)
        if not args.use_megatron_fsdp:
            note = f"without {megatron_lm.FSDP_FLAG} the script runs as it is"
            return {"note": note + resume_check.loaded_by_ddp(args)}
        changes = megatron_lm.complete(args, given.arguments)
        loaded = resume_check.loaded_by(args)
    options = validation.launch_options(args)
    of_run = megatron_lm.problems_of_run(args, os.environ, machine.device())
    of_sizes = sizes.size_problems(vars(options), given.world_size)
    of_schedule = []
    remarks = []
    if loaded.schedule:
        saved = loaded.schedule
        of_schedule = resume_check.schedule_problems(args, given.world_size, saved)
        remarks = resume_check.remarks(args, given.world_size, saved)
    return {
        "sets": [vars(change) for change in changes],
        "ranks": given.world_size or "unknown. Give --world-size",
        "loads": loaded.line,
        "remarks": remarks,
        "refuses": [*of_run, *loaded.problems, *of_schedule, *of_sizes],
    }


def examine(given: argparse.Namespace) -> Report:
    """This process's whole report, of plain values. Raises ValueError for bad input."""
    if given.world_size is not None and given.world_size < 1:
        raise ValueError(f"--world-size {given.world_size}: must be at least 1.")
    report = {
        "versions": versions(),
        "machine": machine.capabilities(),
        "environment": machine.harmful_variables(os.environ),
    }
    # Before `bindings`, which imports megatron: the script's folder must be on the path by then.
    found = configuration(given)
    report["bindings"] = bindings()
    if found is not None:
        report["configuration"] = found
    report["verdict"] = verdict(report)
    return report


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in order. Collective; makes a process group for it."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    try:
        everyone = dist.distributed_c10d._get_default_group()
        return list(Communicator(everyone, torch.device("cpu")).all_objects(value).values())
    finally:
        dist.destroy_process_group()


def examine_together(given: argparse.Namespace) -> Report:
    """The first rank's report with a comparison of all ranks, on every rank. Raises ValueError on
    every rank if one has bad input. Collective."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        own: Report | str = examine(given)
    except (ValueError, OSError) as error:
        own = str(error)  # raised below, after the collective, on all ranks
    of_ranks = gathered((own, nodes.node(), nodes.variables(os.environ)))
    reports, places, variables = zip(*of_ranks, strict=True)
    for found in reports:
        if isinstance(found, str):
            raise ValueError(found)
    facts = [nodes.facts(found) for found in reports]
    report = dict(reports[0])
    report["ranks"] = {
        "nodes": places,
        "differ": nodes.differences(facts, places),
        "variables differ": nodes.differences(variables, places),
    }
    report["verdict"] = verdict(report)
    return report


def problems(report: Report) -> list[str]:
    """The problems in the report that prevent a run."""
    missing = report["bindings"].get("error")
    found = [missing] if missing else []
    found += report.get("configuration", {}).get("refuses", ())
    found += report.get("ranks", {}).get("differ", ())
    return found


def verdict(report: Report) -> str:
    """The report in one line."""
    wrong = len(problems(report))
    found = report.get("configuration")
    if wrong:
        text = f"refused, {wrong} to change (above)"
    elif found is None:
        text = "nothing is wrong here (no configuration was given)"
    elif "note" in found:
        text = "nothing is refused, and nothing is changed"
    else:
        text = "nothing is refused"
    harmful = ", ".join(row["variable"] for row in report["environment"])
    if harmful:
        text += f". Harmful variables (above): {harmful}"
    return f"doctor: {text}"


def render(report: Report) -> str:
    """The report as text."""
    lines = ["versions"]
    for name, row in report["versions"].items():
        remark = releases.remark(name, row["version"])
        lines.append(f"  {name:<22} {row['version']:<18} {remark}".rstrip())
    lines.append("machine")
    lines += [f"  {name:<22} {value}" for name, value in report["machine"].items()]
    lines.append("environment")
    for row in report["environment"]:
        lines.append(f"  {row['variable']}={row['value']}: {row['effect']}")
    if not report["environment"]:
        lines.append("  no harmful variables")
    lines.append("bindings")
    can_rebind = "install() can rebind all names that this Megatron needs"
    lines.append(f"  {report['bindings'].get('error', can_rebind)}")
    if "configuration" in report:
        lines += _configuration_lines(report["configuration"])
    if "ranks" in report:
        lines += nodes.lines_of(report["ranks"])
    lines.append(report["verdict"])
    return "\n".join(lines)


def _configuration_lines(found: Report) -> list[str]:
    if "note" in found:
        return ["configuration", f"  {found['note']}"]
    changes = [Change(**row) for row in found["sets"]]
    lines = [format_changes("configuration: sets", changes), f"  ranks: {found['ranks']}"]
    if found["loads"]:
        lines.append(f"  loads: {found['loads']}")
    lines += [f"  schedule: {line}" for line in found["remarks"]]
    lines.append("configuration: refuses")
    lines += [f"  - {line}" for line in found["refuses"]] or ["  nothing"]
    return lines


def make_parser() -> argparse.ArgumentParser:
    """The parser of `doctor`."""
    parser = base_parser("doctor", __doc__)
    parser.add_argument(
        "--world-size",
        type=int,
        default=os.environ.get("WORLD_SIZE") or None,
        metavar="N",
        help=(
            "ranks of the run; default: WORLD_SIZE of the environment; without either, checks that "
            "depend on it are skipped"
        ),
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option by its name in Megatron's configs, again and again",
    )
    sources.add_flags(parser.add_argument_group("with --prove"), prove.OPTIONS)
    parser.add_argument("script", nargs="?", type=Path, help="a training script of Megatron-LM")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its command line")
    return parser


def main(argv: Sequence[str]) -> int:
    """Prints the report. Returns 0, 1 if there are problems (with --prove: differences), 2 for bad
    input."""
    given = make_parser().parse_args(argv)
    if given.prove:
        return prove.main(given)
    launched = nodes.is_launched(os.environ)
    quiet = launched and not is_first_rank()
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        if quiet:
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        examined = examine_together if launched else examine
        found = answer(given, "doctor", lambda _: examined(given), render)
    if found is None:
        return 2
    return 1 if problems(found) else 0
