"""python -m tests.matrix generate: computes `cells.json` anew, after a change of the table."""

from __future__ import annotations

import argparse

from . import cells


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("generate", help="compute cells.json anew")
    parser.parse_args()
    made = cells.computed()
    cells.write(made)
    for array, rows in made.items():
        print(f"{array}: {len(rows)} cells")


if __name__ == "__main__":
    main()
