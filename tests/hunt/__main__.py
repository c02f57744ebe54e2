"""Hunts for faults with random programs, by hand, for as long as wanted.

    python -m tests.hunt programs --seeds 0:5000 --results runs/hunt.jsonl [--minutes 60]
    python -m tests.hunt summary --results runs/hunt.jsonl
    python -m tests.hunt run FILE [--side torch]
    python -m tests.hunt show SEED

A call with the same results continues with the seeds that they lack. The status is 1 if there are
findings that `tests/lib/hunt/known.py` does not list.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.lib.hunt import hunting, verdict
from tests.lib.hunt.programs import generated, listing, program_of


def seeds_of(text: str) -> range:
    """The seeds of "first:end"."""
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hunt", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    programs = commands.add_parser(
        "programs", help="programs for fully_shard and fully_shard_model"
    )
    programs.add_argument("--seeds", type=seeds_of, required=True, metavar="FIRST:END")
    programs.add_argument("--minutes", type=float, default=float("inf"), help="time to stop after")
    summary = commands.add_parser("summary", help="findings by their signatures")
    for one in (programs, summary):
        one.add_argument("--results", type=Path, required=True, help="a file of JSON lines")
    run = commands.add_parser("run", help="one program, from a file")
    run.add_argument("file", type=Path)
    run.add_argument("--side", choices=("ours", "torch"), default="ours")
    show = commands.add_parser("show", help="print the program of a seed")
    show.add_argument("seed", type=int)
    return parser


def hunt_programs(options: argparse.Namespace) -> int:
    """Runs the command `programs`."""
    end = time.monotonic() + 60 * options.minutes
    one = hunting.Hunt()
    try:
        hunting.hunt(one.looked_at, options.seeds, options.results, lambda: time.monotonic() > end)
    finally:
        one.pair.end()
    new = hunting.new_findings(options.results)
    print(f"{len(new)} new signatures")
    return int(bool(new))


def run_file(options: argparse.Namespace) -> int:
    """Runs the command `run`."""
    one = hunting.Hunt()
    try:
        found = one.judged(program_of(options.file.read_text()), ("unsharded", options.side))
    finally:
        one.pair.end()
    print(found.outcome, found.signature, found.detail, sep="\n")
    return int(found.outcome in verdict.FINDINGS)


def main() -> int:
    options = arguments().parse_args()
    if options.command == "programs":
        return hunt_programs(options)
    if options.command == "run":
        return run_file(options)
    if options.command == "show":
        print(listing(generated(options.seed).statements))
        return 0
    print(hunting.summary(options.results))
    return int(bool(hunting.new_findings(options.results)))


if __name__ == "__main__":
    sys.exit(main())
