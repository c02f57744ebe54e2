"""Runs all tests for GPUs, several files at once, and goes on where an earlier call ended.

    python -m tests.gpu --results runs/gpu.jsonl --log runs/gpu [--time-limit 570] [--only fp8]
    python -m tests.gpu --results runs/gpu.jsonl --list

A test that was running when the time ended counts as not reached, after two attempts as hung. The
status is 0 if nothing failed, hung, or was not reached. `bash scripts/gpu_check.sh` sets what ranks
need that share one GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.lib import strays
from tests.lib.gpu import journal, shards
from tests.lib.gpu.gpu_ranks import STACKS
from tests.lib.gpu.shards import Shard

ENDING_S = 12.0
"""Before the time is up, all that runs is ended, and the table is written."""
LEAST_S = 60.0
"""With less time left no file is begun: its processes would not get as far as a test."""


@dataclass
class Running:
    """A shard in a process of its own; how many lines the journal had of it at the start, and has,
    and when the last of them came. `beside`: the most other shards that ran with it. `gib`: the
    most memory of the device that its processes had."""

    shard: Shard
    process: subprocess.Popen[bytes]
    mark: str
    started: float
    at: float
    lines_before: int
    lines: int
    beside: int = 0
    gib: int = 0


def command_of(shard: Shard, options: argparse.Namespace) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.lib.gpu.journal",
        "--journal",
        str(options.results),
        "--failures",
        str(options.log / "failures.txt"),
        "-rA",
        "--tb=short",
        "--full",
        *(shard.unreached or [shard.path]),
    ]


def start(shard: Shard, options: argparse.Namespace) -> Running:
    mark, value = strays.new_mark()
    log = options.log / f"{shard.name}.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            command_of(shard, options),
            cwd=shards.ROOT,
            env={
                **os.environ,
                strays.VARIABLE: value,
                STACKS: str(options.log / f"{shard.name}.stacks"),
            },
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    now = time.monotonic()
    lines = lines_of(shard, options)
    return Running(shard, process, mark, now, now, lines, lines)


def stop(one: Running) -> None:
    """Ends a shard's processes, also those in sessions of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)
    strays.end_all(one.mark)
    one.process.wait()


def lines_of(shard: Shard, options: argparse.Namespace) -> int:
    """How many lines of tests the journal has."""
    lines = journal.read(options.results)
    return sum(shards.shard_of(line.get("test", "")) == shard.name for line in lines)


def state(options: argparse.Namespace) -> dict[str, Shard]:
    """What is known of all shards that were asked for."""
    found = shards.all_shards()
    shards.learn(found, journal.read(options.results))
    return {n: s for n, s in found.items() if not options.only or options.only in n}


def is_stuck(one: Running, options: argparse.Namespace) -> bool:
    """Whether a test takes longer than one may."""
    if (lines := lines_of(one.shard, options)) != one.lines:
        one.lines, one.at = lines, time.monotonic()
    limit = shards.LIMITS.get(one.shard.name, options.test_limit)
    return time.monotonic() - one.at > limit


def look(running: list[Running]) -> None:
    """Notes how many shards run beside each other, and the device's memory that each has."""
    used = memory_by_process() if running else {}
    for one in running:
        one.beside = max(one.beside, len(running) - 1)
        pids = strays.marked(one.mark) if used else ()
        one.gib = max(one.gib, math.ceil(sum(used.get(pid, 0) for pid in pids) / 1024))


def memory_by_process() -> dict[int, int]:
    """MiB of the devices by process id; empty without a GPU."""
    rows = nvidia_smi("--query-compute-apps=pid,used_memory")
    pairs = [[word.strip() for word in row.split(",")] for row in rows]
    return {int(pid): int(mib) for pid, mib in pairs if mib.isdigit()}


def nvidia_smi(query: str) -> list[str]:
    """The rows that it prints; none without a GPU."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return said.splitlines()


def ended(one: Running, options: argparse.Namespace, why: str) -> None:
    seconds = round(time.monotonic() - one.started, 1)
    idle = not why and lines_of(one.shard, options) == one.lines_before
    status = one.process.returncode
    journal.note(
        options.results,
        shard=one.shard.name,
        ended=status,
        seconds=seconds,
        idle=idle,
        beside=one.beside,
        gib=one.gib,
    )
    counts = state(options)[one.shard.name].counts()
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{seconds:6.0f} s  {one.shard.name}: {said}{why and f' ({why})'}", flush=True)


def forget(options: argparse.Namespace) -> None:
    """What failed or hung is to run once more."""
    for shard in state(options).values():
        journal.note(options.results, shard=shard.name, again=True)


def run(options: argparse.Namespace) -> None:
    """Runs what is left until it is over, or the time is."""
    deadline = time.monotonic() + options.time_limit - ENDING_S
    running: list[Running] = []
    try:
        while True:
            left_s = deadline - time.monotonic()
            busy = [one.shard for one in running]
            names = {shard.name for shard in busy}
            left = shards.in_order(s for s in state(options).values() if s.name not in names)
            chosen = shards.next_of(left, busy, options.jobs, options.memory_gib)
            if chosen is not None and left_s > LEAST_S:
                running.append(start(chosen, options))
                continue
            if left_s <= 0 or not running:
                return
            time.sleep(0.5)
            look(running)
            for one in list(running):
                stuck = is_stuck(one, options)
                if stuck or one.process.poll() is not None:
                    stop(one)
                    running.remove(one)
                    ended(one, options, "a test took too long" if stuck else "")
    finally:
        for one in running:
            stop(one)
            ended(one, options, "the time is up")


def memory_of_the_device() -> float:
    """GiB of the first GPU, less what contexts may take; without one, those of a large one."""
    rows = nvidia_smi("--query-gpu=memory.total")
    if rows:
        return int(rows[0]) / 1024 - 8
    return 130.0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=Path("runs/gpu/results.jsonl"))
    parser.add_argument("--log", type=Path, help="folder; beside the results if not given")
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds of this call")
    parser.add_argument("--test-limit", type=float, default=180.0, help="seconds of one test")
    parser.add_argument("--only", default="", help="files whose names have this in them")
    parser.add_argument("--jobs", type=int, default=6, help="files at once")
    parser.add_argument("--memory-gib", type=float, help="of the device; asked of nvidia-smi")
    parser.add_argument("--again", action="store_true", help="also what failed or hung before")
    parser.add_argument("--list", action="store_true", help="what is left, in its order")
    options = parser.parse_args(arguments)
    options.results = options.results.resolve()
    options.log = (options.log or options.results.parent).resolve()
    options.memory_gib = options.memory_gib or memory_of_the_device()
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    found = state(options)
    if options.list:
        for shard in shards.in_order(found.values()):
            if shard.gib >= shards.ALONE:
                alone = "alone"
            else:
                alone = f"{shard.gib} GiB"
            if shard.listed:
                left = f"{len(shard.unreached)} tests"
            else:
                left = "all its tests"
            print(f"{shard.name:32} {left:14} {alone:>8}, some {shard.expected_s:.0f} s")
        return 0
    for folder in (options.log, options.results.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if options.again:
        forget(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run(options)
    found = state(options)
    told = shards.table(found.values())
    (options.log / "table.txt").write_text(told + "\n")
    print(told)
    return int(not shards.is_clean(found.values()))


if __name__ == "__main__":
    sys.exit(main())
