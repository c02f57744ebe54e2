"""Train a small GPT on real text in several precisions, and compare the loss curves.

    python scripts/fp8_loss_curves.py --ranks 2 --out runs/fp8-curves --time-limit 170

Runs are wrappers of benchmark.py in a precision, with a seed: ours and Megatron's DDP with FP8
weights, ours in bf16 with three seeds, whose spread the others are held against. The text is the
source of Python's standard library. All runs share their processes, to load libraries once; one
that hangs or dies is given up, and new processes go on with the next. What ``--out`` holds already
is not trained again. Other options are those of pretrain_gpt.py. Not started with torchrun.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from compare_losses import read_log
from lib.bench_apart import last_line, run_ranks
from lib.bench_measure import reason as reason_of
from lib.check import Machine, this_machine, validated
from lib.loss_curves import DEFAULT_RUNS, Run, draw, parse_runs, summary, table_text
from lib.options import Options
from lib.options import parse as parse_options

PRESET = Path(__file__).parents[1] / "configs" / "fp8-small.yaml"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes of a run; one a GPU")
    add("--runs", default=DEFAULT_RUNS, help="WRAPPER@PRECISION#SEED, ... (default %(default)s)")
    add("--out", type=Path, required=True, help="folder for logs, picture and table")
    add("--data", type=Path, help="folder of the text, made if it is not there; default OUT/data")
    add("--start-limit", type=float, default=300.0, help="seconds to load libraries")
    add("--run-limit", type=float, default=60.0, help="seconds of one run")
    add("--time-limit", type=float, default=3600.0, help="seconds of all runs")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


@dataclasses.dataclass(frozen=True)
class Call:
    """What this script is told; `options` are those that all runs have in common."""

    runs: list[Run]
    given: argparse.Namespace
    options: Options
    machine: Machine
    rest: list[str]

    def log(self, run: Run) -> Path:
        """Of a run that has ended; while it trains the name ends in `.unfinished`."""
        return self.given.out / f"{run.file_name}.jsonl"

    def todo(self) -> list[Run]:
        return [run for run in self.runs if not self.log(run).is_file()]


def parse(arguments: Sequence[str]) -> Call:
    """Raises ValueError or FileNotFoundError before anything is started."""
    given, rest = make_parser().parse_known_args(list(arguments))
    if given.ranks < 1 or min(given.start_limit, given.run_limit, given.time_limit) <= 0:
        raise ValueError(
            f"--ranks {given.ranks}, --start-limit {given.start_limit}, --run-limit "
            f"{given.run_limit}, --time-limit {given.time_limit}: each must be above 0"
        )
    runs = parse_runs(given.runs)
    given.data = data = given.data or given.out / "data"
    options = parse_options(
        [
            f"--config={PRESET}",
            f"--train-data-path={data / 'text_train'}",
            f"--valid-data-path={data / 'text_valid'}",
            f"--data-cache-path={data / 'cache'}",
            *rest,
        ]
    )
    machine = dataclasses.replace(this_machine(), world_size=given.ranks)
    unread = {"mock_data": True, "train_data_path": None, "valid_data_path": None}
    validated(dataclasses.replace(options, **unread), machine)  # the text is not there yet
    return Call(runs, given, options, machine, rest)


def prepare_text(call: Call) -> None:
    """Once."""
    from prepare_data import main as prepare

    call.given.out.mkdir(parents=True, exist_ok=True)
    prefix = call.given.data / "text"
    if Path(f"{prefix}_valid.idx").is_file():
        return
    if prepare(["--output-prefix", str(prefix), "--max-bytes", "20000000"]):
        raise ValueError(f"--data {call.given.data}: no text could be made there")


def train_all(call: Call) -> dict[Run, str]:
    """Starts processes until every run has ended or has failed: the reasons of those that did."""
    started, failed, given = time.monotonic(), refused(call), call.given
    script = [sys.executable, str(Path(__file__)), "--worker", "--ranks", str(given.ranks)]
    while todo := [run for run in call.todo() if run not in failed]:
        left = given.time_limit - (time.monotonic() - started)
        if left <= 0:
            break
        names = ",".join(run.name for run in todo)
        log = given.out / "processes.log"
        limit = min(left, given.start_limit + given.run_limit * len(todo))
        reason = run_ranks(
            [*script, "--runs", names, "--out", str(given.out), "--data", str(given.data),
             *call.rest, "--run-limit", str(given.run_limit)],
            given.ranks, limit, log,
        )  # fmt: skip
        after = [run for run in todo if not call.log(run).is_file()]
        if after and (reason is not None or after == todo):
            failed[after[0]] = _told(reason, left == limit, given, log)
            log.replace(call.given.out / f"{after[0].file_name}.log")
            print(f"{after[0].name}: {failed[after[0]]}", file=sys.stderr, flush=True)
    return failed


def _told(reason: str | None, is_last: bool, given: argparse.Namespace, log: Path) -> str:
    """Why a run has not ended, and which limit to raise if it was one. is_last: the processes were
    given all that was left of --time-limit."""
    if GAVE_UP in log.read_text(errors="replace"):
        return f"not done after --run-limit {given.run_limit:g} s: raise it, or train less"
    if (reason or "").startswith("not done"):
        raised = "--time-limit" if is_last else "--start-limit or --run-limit"
        return f"{reason}: raise {raised}; {last_line(log)}"
    return f"{reason or 'it did not end'}; {last_line(log)}"


def refused(call: Call) -> dict[Run, str]:
    """The runs that this machine cannot do, with the reasons."""
    from lib.bench_wrappers import row_options

    found = {}
    for run in call.todo():
        try:
            row_options(run.subject, call.options, call.machine)
        except ValueError as error:
            found[run] = reason_of(error)
    return found


def worker(call: Call) -> int:
    """A rank: all runs, one after the other. A run that raises ends the process."""
    from lib import distributed, loop, model
    from lib.bench_wrappers import forget_fp8, row_options
    from lib.checkpoints import Progress

    options = [
        row_options(run.subject, dataclasses.replace(call.options, seed=run.seed))
        for run in call.runs
    ]
    place = distributed.start(options[0])
    for run, chosen in zip(call.runs, options, strict=True):
        _give_up_after(call.given.run_limit, run)
        log = call.log(run)
        unfinished = log.with_suffix(".unfinished")
        forget_fp8()
        distributed.seed_everything(run.seed)
        chosen = dataclasses.replace(chosen, loss_log_file=str(unfinished))
        trainee = model.build(chosen, place)
        loop.train(trainee, chosen, place, Progress())
        if place.first:
            os.replace(unfinished, log)
            print(f"{run.name}: done", flush=True)
        del trainee
        gc.collect()
    distributed.stop()
    return 0


GAVE_UP = "Timeout ("
"""How faulthandler begins what it writes when the time of a run is over."""


def _give_up_after(seconds: float, run: Run) -> None:
    """Ends the process, with its stack, if it is still in this run then."""
    import faulthandler

    faulthandler.dump_traceback_later(seconds, exit=True)
    print(f"{run.name}: begins", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0; 1 when a run failed or is further from bf16 than seeds are from each other; 2
    for options that cannot work."""
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # ours and DDP: the same kernels
    try:
        call = parse(arguments)
        if call.given.worker:
            return worker(call)
        prepare_text(call)
    except (ValueError, FileNotFoundError) as error:
        if "RANK" in os.environ:
            traceback.print_exc()
        print(f"fp8_loss_curves.py: {error}", file=sys.stderr)
        return 2
    failed = train_all(call)
    logs = {run: read_log(call.log(run)) for run in call.runs if call.log(run).is_file()}
    lines = [f"{run.name}: not trained: {failed.get(run, '--time-limit is over')}"
             for run in call.todo()]  # fmt: skip
    if logs:
        found = summary(logs)
        lines.insert(0, table_text(found))
        if find_spec("matplotlib") is None:
            lines.append("no picture: matplotlib is not installed; run again where it is")
        else:
            draw(logs, call.given.out / "curves.png")
    text = "\n".join(lines)
    (call.given.out / "table.md").write_text(text + "\n")
    print(text)
    return 1 if call.todo() or not logs or found.outside else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
