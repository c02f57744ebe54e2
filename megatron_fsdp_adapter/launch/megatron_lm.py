"""The arguments of Megatron-LM: missing flags of its main branch, and settings that follow from
`--use-megatron-fsdp`.

The hook is at `megatron.training.arguments`: `add_megatron_arguments` gets the missing flags, and
the result of `parse_args` is completed and checked before Megatron validates it. So the changes are
among the arguments that Megatron prints and saves.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ..core.runtime.launcher import is_first_rank, refuse
from ..megatron.compat import patches, releases
from ..megatron.compat.patches import Patch
from ..megatron.elastic import manager
from ..megatron.options import capability
from ..megatron.options.cuda_graphs import GRAPH_RULES
from ..megatron.options.examples import not_followed
from ..megatron.options.rules import Joined, problems
from ..megatron.options.settings import RUNNER, Change, format_changes, settle
from ..megatron.options.support import EMERGING, SCHEDULE_RULES
from ..megatron.options.table import OPTIONS
from ..megatron.options.validation import CONNECTIONS, launch_options, launch_problems

FSDP_FLAG = "--use-megatron-fsdp"
ARGUMENTS = "megatron.training.arguments"
GPU = torch.device("cuda")
NO_GPU = (
    "there is no CUDA device, which Megatron-LM's arguments need. Train with "
    "scripts/pretrain_gpt.py, or check this command line with `megatron-fsdp-adapter "
    "doctor --prove`"
)


def was_given(flag: str, argv: Sequence[str]) -> bool:
    """True if the command line has the flag, as `--flag`, `--flag value` or `--flag=value`."""
    with_value = f"{flag}="
    return any(word == flag or word.startswith(with_value) for word in argv)


def complete(args: Any, argv: Sequence[str]) -> list[Change]:
    """Sets the arguments that follow from `--use-megatron-fsdp`; returns the changes. Flags in
    `argv` keep their values, unless they have no meaning here."""
    # All of Megatron-LM's arguments are in one object, which stands for each config.
    sections = dict.fromkeys(("ddp", "optimizer", "checkpoint", "run"), args)
    return settle(RUNNER, sections, is_written=lambda flag: was_given(flag, argv))


def complete_environment(environment: MutableMapping[str, str]) -> list[Change]:
    """Sets `CUDA_DEVICE_MAX_CONNECTIONS` if it is unset; returns the change. CUDA reads it when it
    is initialized, so call this before."""
    if CONNECTIONS in environment:
        return []
    environment[CONNECTIONS] = "8"
    return [Change(CONNECTIONS, None, "8", "hardware queues: communication runs beside compute")]


def hook_arguments(
    argv: Sequence[str],
    environment_changes: Sequence[Change],
    on_fsdp: Callable[[], None],
    on_other: Callable[[], None],
) -> None:
    """Makes `megatron.training.arguments` accept the missing flags and complete parsed arguments.

    argv: the script's command line; environment_changes: rows for the table; on_fsdp, on_other:
    called after parsing, depending on `--use-megatron-fsdp`.

    Raises:
        RuntimeError: this Megatron-LM lacks a name that is hooked.
    """
    reported: list[bool] = []  # not empty after the first report

    def add(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
        if was_given(FSDP_FLAG, argv):
            # The `error` of argparse first prints the usage of hundreds of arguments.
            parser.error = lambda message: refuse(f"{parser.prog}: {message}")  # type: ignore[method-assign]
        return add_missing_flags(original(parser))

    def parse(original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        args = original(*positional, **named)
        if getattr(args, "use_megatron_fsdp", False):
            # Megatron-LM parses several times; only the first time the changes are printed.
            finish(args, argv, environment_changes, finds_gpu(), silent=reported)
            reported.append(True)
            on_fsdp()
        else:
            on_other()
        return args

    def error(lacks: str) -> str:
        return (
            f"this Megatron-LM has no {lacks}: {FSDP_FLAG} cannot be completed. "
            f"{releases.remedy()}, or call megatron_fsdp_adapter.install() in the script"
        )

    hooks = {"add_megatron_arguments": add, "parse_args": parse, "validate_args": validate}
    rows = [Patch(ARGUMENTS, name, ours, everywhere=True) for name, ours in hooks.items()]
    patches.install(rows, error)


def validate(original: Callable[..., Any], args: Any, *positional: Any, **named: Any) -> Any:
    """Runs Megatron-LM's validation of arguments, with optimizer="adam" in the place of one of
    `EMERGING`; returns what that returns.

    The validation asserts that with other optimizers than Adam and SGD weights are not sharded, and
    that checkpoints have another format. Neither holds here.
    """
    asked = args.optimizer
    if asked not in EMERGING or not getattr(args, "use_megatron_fsdp", False):
        return original(args, *positional, **named)
    args.optimizer = "adam"
    try:
        return original(args, *positional, **named)
    finally:
        args.optimizer = asked


def add_missing_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of `OPTIONS` that the parser lacks; returns the parser."""
    for option in OPTIONS:
        if option.help and option.flag not in parser._option_string_actions:
            option.add_to(parser)
    return parser


def finds_gpu() -> bool:
    """True if `megatron.training.arguments`, which must be imported already, would find a GPU by
    its name `torch`. It queries the GPU's capability."""
    seen = getattr(sys.modules[ARGUMENTS], "torch", None)
    if seen is None:
        return True
    return bool(seen.cuda.is_available())


def problems_of_run(
    args: Any, environment: Mapping[str, str], device: torch.device | None
) -> list[str]:
    """All problems of parsed arguments and environment, including those of `device` (if not None)
    and of CUDA graphs. The wrapper reports problems that depend on the release of megatron-core."""
    options = launch_options(args)
    on_gpu = SimpleNamespace(device=GPU, asks_tokens=False, fsdp_double_buffer=False)
    found = list(launch_problems(args, environment))
    if device is not None:
        found += capability.device_problems(options, device)
    found += problems(Joined(options, on_gpu), (*GRAPH_RULES, *SCHEDULE_RULES))
    return found


def finish(
    args: Any,
    argv: Sequence[str],
    environment_changes: Sequence[Change],
    has_gpu: bool = True,
    silent: object = False,
) -> None:
    """Completes parsed arguments and prints the changes on rank 0, unless `silent` is truthy. If
    there are problems, or no GPU, ends the process with status 2 and one message instead of a
    traceback."""
    changes = [*complete(args, argv), *environment_changes]
    # GPU capabilities are checked after the rank has chosen its GPU, because the query initializes
    # CUDA.
    if has_gpu:
        found = problems_of_run(args, os.environ, None)
    else:
        found = problems_of_run(args, os.environ, torch.device("cpu"))
        found.append(NO_GPU)
    if is_first_rank() and not silent:
        print(format_changes(f"{FSDP_FLAG} sets", changes), flush=True)
        left = not_followed(args)
        if left:
            print(left, flush=True)
    if found:
        refuse(error_message(found))
    manager.ask(args)


def error_message(found: Sequence[str]) -> str:
    """All problems of the command line as one message."""
    lines = "\n".join(f"  - {line}" for line in found)
    return f"{FSDP_FLAG} cannot be used with this configuration:\n{lines}"
