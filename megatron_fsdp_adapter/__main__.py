"""`python -m megatron_fsdp_adapter COMMAND ...`"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {"estimate": "megatron_fsdp_adapter.cli.estimate"}


def main(argv: list[str]) -> int:
    """Runs a command; prints the list of them and returns 2 when there is no such command."""
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m megatron_fsdp_adapter {{{','.join(COMMANDS)}}} ...\n"
              "       each command explains itself with --help", file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    return int(importlib.import_module(COMMANDS[argv[0]]).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
