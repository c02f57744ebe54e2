"""`megatron-fsdp-adapter SCRIPT.py ...` or `COMMAND ...`; `python -m megatron_fsdp_adapter` is the
same, also where the package is not installed."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import warnings

from . import __version__
from .tools.cli import recorded

COMMANDS = {
    "convert": "converts a checkpoint to another format",
    "diff": "compares two checkpoints bit by bit",
    "doctor": "checks the installation, this machine and a configuration",
    "estimate": "counts bytes per rank by kind of buffer and strategy",
    "inspect": "lists the contents of a checkpoint",
    "plan": "finds the fastest configurations for a number of GPUs",
    "verify": "checks that a checkpoint is undamaged",
}
"""Command, which is a module of `tools/cli` -> a line about it."""
COMMAND_LINES = "\n".join(f"  {name:<10} {does}" for name, does in COMMANDS.items())
USAGE = f"""\
usage: megatron-fsdp-adapter COMMAND ...
       megatron-fsdp-adapter path/to/pretrain_gpt.py --use-megatron-fsdp ...
       megatron-fsdp-adapter --version

commands (each has --help):
{COMMAND_LINES}

A script runs with the wrapper installed, and gets all arguments after it; under torchrun:
    torchrun ... -m megatron_fsdp_adapter path/to/pretrain_gpt.py --use-megatron-fsdp ...
`python -m megatron_fsdp_adapter` is the same as `megatron-fsdp-adapter`.

Exit status: that of the command or script; 2 for bad arguments."""


def _command(argv: list[str]) -> int:
    """Runs a command; returns its status, or that of SIGPIPE if `head` or `less` has closed the
    pipe."""
    if not sys.warnoptions:
        # Warnings about packages that Megatron lacks and commands do not need, and about a single
        # process.
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled")
    recorded.check(argv[0], argv[1:])
    try:
        module = importlib.import_module(f"megatron_fsdp_adapter.tools.cli.{argv[0]}")
        status = int(module.main(argv[1:]))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _is_closed(sys.stdout.fileno()):
            raise
        # Python writes buffered output once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _is_closed(pipe: int) -> bool:
    """True if no process reads from the pipe."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(found & select.POLLERR for _, found in poll.poll(0))


def main(argv: list[str] | None = None) -> int:
    """Runs a command, or a script with the wrapper installed; returns its status. Anything else
    prints the usage and returns 2. argv: default: the arguments of this process."""
    if argv is None:
        argv = sys.argv[1:]
    if argv and argv[0] in COMMANDS:
        return _command(argv)
    if argv and argv[0].endswith(".py"):
        from .launch.runner import run

        return run(argv)
    if argv == ["--version"]:
        print(f"megatron_fsdp_adapter {__version__}")
        return 0
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if argv:
        from .tools.cli.unknown import unknown

        print(unknown("command", argv[0], COMMANDS), file=sys.stderr)
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
