"""Shell completion of commands and their options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from .output import PROGRAM


def print_completion(
    argv: Sequence[str], modules: Mapping[str, ModuleType], does: Mapping[str, str]
) -> int:
    """Prints the completion script of the shell that `argv` names. Returns 0, or 2 for bad input.

    modules, does: by command, its module, which has `make_parser`, and what it does."""
    try:
        import shtab
    except ModuleNotFoundError:
        print("--print-completion: shtab is not installed. Install it, or "
              "megatron-fsdp-adapter[completion]", file=sys.stderr)  # fmt: skip
        return 2
    if len(argv) != 1 or argv[0] not in shtab.SUPPORTED_SHELLS:
        shells = ", ".join(shtab.SUPPORTED_SHELLS)
        print(f"--print-completion {' '.join(argv)}: unknown shell. Name one of {shells}",
              file=sys.stderr)  # fmt: skip
        return 2
    program = argparse.ArgumentParser(prog=PROGRAM)
    program.add_argument("--version", action="store_true", help="print the version")
    commands = program.add_subparsers()
    for name, module in modules.items():
        parser = module.make_parser()
        for action in parser._actions:
            if action.type is Path or action.metavar == "FILE":
                action.complete = shtab.FILE
        commands.add_parser(name, parents=[parser], add_help=False, help=does[name])
    print(shtab.complete(program, shell=argv[0]))
    return 0
