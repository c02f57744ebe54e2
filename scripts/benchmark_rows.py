"""One table of many wrappers, each measured in processes of its own, one after the other.

    python scripts/benchmark_rows.py --ranks 2 --rows fp8 --time-limit 570 --row-limit 75 \\
        --out runs/fp8 --preset configs/llama3-8b.yaml --num-layers 24 --steps 3 --repeats 3

A wrapper that hangs, crashes or runs out of memory has a line with its reason. What ``--out`` holds
already is not measured again, so a second call with the same options goes on where time ended.
Options beyond those of ``--help`` are those of benchmark.py. Ratios are of medians: the rows share
no rounds. Not started with torchrun.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmark
from lib.bench_apart import Apart, Limits, beside_floors, command, from_plain
from lib.bench_measure import Result
from lib.bench_subjects import SETS, Plan, Subject, parse_subjects
from lib.check import Machine, this_machine
from lib.options import Options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, required=True, help="processes of a row; one a GPU")
    add("--rows", required=True, help="wrappers in order, as --wrappers of benchmark.py; or the "
        f"name of a list: {', '.join(SETS)}")  # fmt: skip
    add("--out", type=Path, required=True, help="folder for the table, numbers and logs")
    add("--row-limit", type=float, default=90.0, help="seconds of one row")
    add("--time-limit", type=float, default=3600.0, help="seconds of all rows")
    return parser


@dataclasses.dataclass(frozen=True)
class Call:
    """What this script is told. `options` and `plan` are those that each row has in common;
    `machine`: as a process of a row finds it."""

    subjects: list[Subject]
    machine: Machine
    out: Path
    limits: Limits
    plan: Plan
    options: Options
    rest: list[str]


def parse(arguments: Sequence[str]) -> Call:
    """Raises ValueError or FileNotFoundError before anything is started."""
    known, rest = make_parser().parse_known_args(list(arguments))
    for taken in ("--wrappers", "--json", "--plot", "--isolated"):
        if any(one == taken or one.startswith(f"{taken}=") for one in rest):
            raise ValueError(f"{taken}: each row has its own here; use --rows and --out")
    if known.ranks < 1:
        raise ValueError(f"--ranks {known.ranks}: must be at least 1")
    settings, options = benchmark.parse_arguments([*rest, "--isolated"])
    machine = dataclasses.replace(this_machine(), world_size=known.ranks)
    options = benchmark.common_options(options, settings.plan.num_microbatches, machine)
    subjects = parse_subjects(SETS.get(known.rows, known.rows))
    limits = Limits(known.row_limit, known.time_limit)
    return Call(subjects, machine, known.out, limits, settings.plan, options, rest)


def earlier(call: Call) -> list[Result]:
    """Rows of an earlier call. ValueError if that was about something else."""
    path = call.out / "rows.json"
    if not path.is_file():
        return []
    content = json.loads(path.read_text())
    if content["arguments"] != call.rest or content["ranks"] != call.machine.world_size:
        raise ValueError(
            f"--out {call.out}: holds rows of other options ({' '.join(content['arguments'])}; "
            f"{content['ranks']} ranks); choose another folder"
        )
    return [from_plain(row) for row in content["rows"]]


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0; 1 when a row could not be measured or trained differently; 2 for options
    that cannot work."""
    try:
        call = parse(arguments)
        known = earlier(call)
    except (ValueError, FileNotFoundError) as error:
        print(f"benchmark_rows.py: {error}", file=sys.stderr)
        return 2
    # Imported here so that bad options are told at once: megatron-core takes seconds to import.
    from lib import bench_report
    from lib.bench_wrappers import row_options

    unit = bench_report.MIB if call.options.distributed_backend == "gloo" else bench_report.GIB

    def table(results: Sequence[Result]) -> list[bench_report.Row | Result]:
        return bench_report.rows(beside_floors(results), call.plan, call.options)

    def note(results: Sequence[Result]) -> None:
        rows = table(results)
        call.out.mkdir(parents=True, exist_ok=True)
        content = {
            "arguments": call.rest,
            "ranks": call.machine.world_size,
            "rows": bench_report.plain_rows(rows),
        }
        (call.out / "rows.json").write_text(json.dumps(content, indent=1) + "\n")
        (call.out / "rows.txt").write_text(bench_report.table_text(rows, unit) + "\n")
        print(bench_report.table_text(rows[-1:], unit), file=sys.stderr, flush=True)

    def refuse(subject: Subject) -> None:
        row_options(subject, call.options, call.machine)

    each = call.out / "each"
    apart = Apart(command(call.rest), call.machine.world_size, each, call.limits, refuse, note)
    rows = table(apart.run(call.subjects, known))
    print(bench_report.table_text(rows, unit), flush=True)
    return 0 if all(isinstance(row, bench_report.Row) and not row.flag for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
