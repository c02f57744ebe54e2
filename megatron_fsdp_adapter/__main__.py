"""`python -m megatron_fsdp_adapter SCRIPT.py ...` or `COMMAND ...`"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "convert": "megatron_fsdp_adapter.cli.convert",
    "diff": "megatron_fsdp_adapter.cli.diff",
    "doctor": "megatron_fsdp_adapter.cli.doctor",
    "estimate": "megatron_fsdp_adapter.cli.estimate",
    "inspect": "megatron_fsdp_adapter.cli.inspect",
    "plan": "megatron_fsdp_adapter.planning.command",
    "verify": "megatron_fsdp_adapter.cli.verify",
}
USAGE = f"""\
usage: python -m megatron_fsdp_adapter path/to/pretrain_gpt.py --use-megatron-fsdp ...
       python -m megatron_fsdp_adapter {{{",".join(COMMANDS)}}} ...
       a command explains itself with --help; a script gets all arguments after it"""


def main(argv: list[str]) -> int:
    """Runs a command, or a script with the wrapper installed; prints the usage and returns 2 for
    what is neither."""
    if argv and argv[0] in COMMANDS:
        return int(importlib.import_module(COMMANDS[argv[0]]).main(argv[1:]))
    if argv and argv[0].endswith(".py"):
        from .launch.runner import run

        return run(argv)
    print(USAGE, file=sys.stderr)
    return 0 if argv[:1] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
