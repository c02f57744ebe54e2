"""The matrix on the command line.

    python -m tests.matrix generate       # cells.json anew, after a change of the table
    python -m tests.matrix list [--array cpu] [--match layers=moe]
    python -m tests.matrix count          # pairs and rules, for docs/matrix.md
"""

from __future__ import annotations

import argparse
import sys

from . import cells as arrays
from .cover import covered
from .table import ARRAYS, DIMENSIONS, MEANING, REFERENCE, RULES


def _count(options: argparse.Namespace) -> int:
    print("| dimension | values | meaning |\n|---|---|---|")
    for name, values in DIMENSIONS.items():
        print(f"| {name} | {', '.join(map(str, values))} | {MEANING[name]} |")
    print(f"\nReference: {', '.join(f'{n}={v}' for n, v in REFERENCE.items())}\n")
    print("| array | pairs of values | possible pairs | pairs in cells | excluded pairs | cells |")
    print("|---|---|---|---|---|---|")
    for array in ARRAYS:
        space, rows = arrays.space(array), arrays.cached(array)
        possible = set(space.possible_pairs)
        print(
            f"| `{array}` | {len(space.all_pairs)} | {len(possible)} "
            f"| {len(covered(rows, space) & possible)} | {len(space.all_pairs) - len(possible)} "
            f"| {len(rows)} |"
        )
    print("\n| rule | why |\n|---|---|")
    for rule in RULES:
        print(f"| {rule.name} | {rule.reason} |")
    return 0


def _generate(options: argparse.Namespace) -> int:
    made = arrays.computed()
    arrays.write(made)
    for array, rows in made.items():
        print(f"{array}: {len(rows)} cells")
    return 0


def _list(options: argparse.Namespace) -> int:
    print("\n".join(arrays.cells_with(options.match, options.array)))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("generate", help="cells.json anew").set_defaults(act=_generate)
    commands.add_parser("count", help="pairs and rules, in Markdown").set_defaults(act=_count)
    listing = commands.add_parser("list", help="names of cells")
    listing.set_defaults(act=_list)
    listing.add_argument("--array", choices=list(ARRAYS), default="cpu")
    listing.add_argument("--match", nargs="*", default=[], help="words that a cell's name has")
    options = parser.parse_args(arguments)
    return int(options.act(options))


if __name__ == "__main__":
    sys.exit(main())
