"""Hunts for faults with random programs and life cycles, by hand, for as long as wanted.

    python -m tests.hunt programs --seeds 0:5000 --results runs/hunt.jsonl [--minutes 60]
    python -m tests.hunt cycles --checkout Megatron-LM --seeds 0:500 --results runs/cycles.jsonl
                                [--device cuda] [--jobs 12] [--trials 0]
    python -m tests.hunt summary --results runs/hunt.jsonl
    python -m tests.hunt run FILE [--side torch] [--checkout Megatron-LM]
    python -m tests.hunt show SEED

A call with the same results continues with the seeds that they lack. The status is 1 if there are
findings that `tests/lib/hunt/known.py` does not list.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.lib.gpu import journal
from tests.lib.hunt import verdict
from tests.lib.hunt.cycle_hunting import MOST_TRIALS, CycleHunt, counts_of, cycle_of
from tests.lib.hunt.cycles import machine_of, parser_options
from tests.lib.hunt.grammar import ROWS
from tests.lib.hunt.hunting import Hunt, hunt, new_findings, seeds_left, summary, write
from tests.lib.hunt.jobs import lines_of
from tests.lib.hunt.known import KINDS_OF_KNOWN
from tests.lib.hunt.programs import generated, listing, program_of


def seeds_of(text: str) -> range:
    """The seeds of "first:end"."""
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def kinds_of(text: str) -> list[str]:
    """Kinds of statements, from a text with commas."""
    kinds = text.split(",")
    unknown = {*kinds} - {row.kind for row in ROWS}
    if unknown:
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}: tests/lib/hunt/grammar.py has none")
    return kinds


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hunt", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    programs = commands.add_parser(
        "programs", help="programs for fully_shard and fully_shard_model"
    )
    programs.add_argument(
        "--without",
        type=kinds_of,
        default=[],
        metavar="KINDS",
        help="kinds of statements to leave out, such as those of known findings, with commas",
    )
    programs.add_argument("--skip-known", action="store_true", help="leave out all such kinds")
    cycles = commands.add_parser("cycles", help="life cycles of Megatron-LM's training")
    for one in (programs, cycles):
        one.add_argument("--seeds", type=seeds_of, required=True, metavar="FIRST:END")
        one.add_argument("--minutes", type=float, default=float("inf"), help="time to stop after")
    grouped = commands.add_parser("summary", help="findings by their signatures")
    for one in (programs, cycles, grouped):
        one.add_argument("--results", type=Path, required=True, help="a file of JSON lines")
    run = commands.add_parser("run", help="one program or life cycle, from a file")
    run.add_argument("file", type=Path)
    run.add_argument("--side", choices=("ours", "torch"), default="ours")
    for one in (programs, cycles, run):
        one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    cycles.add_argument("--jobs", type=int, default=1, help="cycles at once")
    cycles.add_argument(
        "--trials", type=int, default=MOST_TRIALS, help="most smaller cycles after a failure"
    )
    for one in (cycles, run):
        one.add_argument("--checkout", type=Path, required=one is cycles, help="of Megatron-LM")
    show = commands.add_parser("show", help="print the program of a seed")
    show.add_argument("seed", type=int)
    return parser


def run_programs(options: argparse.Namespace, is_over: Callable[[], bool]) -> None:
    """Runs the command `programs`."""
    without = {*options.without, *(KINDS_OF_KNOWN if options.skip_known else ())}
    hunter = Hunt(without=without, device=options.device)
    try:
        hunt(hunter.looked_at, options.seeds, options.results, is_over)
    finally:
        hunter.end()


def run_cycles(options: argparse.Namespace, is_over: Callable[[], bool]) -> None:
    """Runs the command `cycles`."""
    checkout = options.checkout.resolve()
    machine = machine_of(options.device)
    parsers = parser_options(checkout, machine)
    make = functools.partial(CycleHunt, checkout, machine, options.trials, parsers)
    seeds = seeds_left(options.seeds, options.results)
    if options.jobs > 1:
        for line in lines_of(make, options.jobs, seeds, is_over):
            write(line, options.results)
        return
    hunter = make()
    try:
        hunt(hunter.looked_at, seeds, options.results, is_over)
    finally:
        hunter.end()


def run_hunt(options: argparse.Namespace) -> int:
    """Runs the commands `programs` and `cycles`."""
    end = time.monotonic() + 60 * options.minutes
    run = run_programs if options.command == "programs" else run_cycles
    run(options, lambda: time.monotonic() > end)
    new = new_findings(options.results)
    print(f"{len(new)} new signatures")
    return int(bool(new))


def run_file(options: argparse.Namespace) -> int:
    """Runs the command `run`."""
    text = options.file.read_text()
    cycle = cycle_of(text)
    hunter: Hunt | CycleHunt
    if cycle.statements:
        hunter = CycleHunt(options.checkout.resolve(), machine_of(options.device))
    else:
        hunter = Hunt(device=options.device)
    try:
        if isinstance(hunter, CycleHunt):
            found = hunter.judged(cycle)
        else:
            found = hunter.judged(program_of(text), ("unsharded", options.side))
    finally:
        hunter.end()
    print(found.outcome, found.signature, found.detail, sep="\n")
    return int(found.outcome in verdict.FINDINGS)


def main() -> int:
    options = arguments().parse_args()
    if options.command in ("programs", "cycles"):
        return run_hunt(options)
    if options.command == "run":
        return run_file(options)
    if options.command == "show":
        print(listing(generated(options.seed).statements))
        return 0
    print(summary(options.results))
    print(counts_of(journal.read(options.results)))
    return int(bool(new_findings(options.results)))


if __name__ == "__main__":
    sys.exit(main())
