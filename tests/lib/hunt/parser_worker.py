"""Prints the options of Megatron's own parser, and those with the flags that the runner adds, as
JSON: runs as a process of its own, because it imports a checkout.

    python -m tests.lib.hunt.parser_worker CHECKOUT on_cpu
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from pathlib import Path

HARNESSES = Path(__file__).parents[1] / "integration"


def parsers_of(checkout: Path, harness: str) -> list[dict[str, list[str] | None]]:
    """The options of the checkout's parser, as a harness prepares it, and those of the runner."""
    sys.path.insert(0, str(HARNESSES))
    importlib.import_module(harness).prepare_megatron_lm(checkout)
    from megatron.training.arguments import add_megatron_arguments

    from megatron_fsdp_adapter.launch.megatron_lm import add_missing_flags

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    stock = options_of(parser)
    return [stock, options_of(add_missing_flags(parser))]


def options_of(parser: argparse.ArgumentParser) -> dict[str, list[str] | None]:
    """The options of a parser: the choices of each, [] for a switch, None for one that takes any
    value."""
    found: dict[str, list[str] | None] = {}
    for action in parser._actions:
        for name in action.option_strings:
            if action.nargs == 0:
                found[name] = []
            elif action.choices:
                found[name] = [str(choice) for choice in action.choices]
            else:
                found[name] = None
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        options = parsers_of(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps(options))
