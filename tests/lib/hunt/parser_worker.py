"""Prints the options of Megatron's own parser, as JSON: runs as a process of its own, because it
imports a checkout.

    python -m tests.lib.hunt.parser_worker CHECKOUT
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

HARNESSES = Path(__file__).parents[1] / "integration"


def options_of(checkout: Path) -> dict[str, list[str] | None]:
    """The options of the checkout's parser: the choices of each, [] for a switch, None for one that
    takes any value."""
    sys.path.insert(0, str(HARNESSES))
    import on_cpu

    on_cpu.prepare_megatron_lm(checkout)
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
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
        options = options_of(Path(sys.argv[1]))
    print(json.dumps(options))
