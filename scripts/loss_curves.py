"""Loss curves: compare two logs bit for bit, or train a small GPT in several ways.

    python scripts/loss_curves.py --compare runs/first.jsonl runs/second.jsonl --png losses.png \
        --ddp runs/ddp.jsonl --resumed-at 30
    python scripts/loss_curves.py --ranks 2 --out runs/fp8-curves --runs fp8
    python scripts/loss_curves.py --ranks 2 --out runs/muon-curves --runs muon \
        --config configs/muon-cpu.yaml --run-limit 3000                      # without GPUs

Runs are wrappers of benchmark.py in a precision, with a seed, on the source of Python's standard
library. The reference is ours in bf16 with Adam, and the spread of its seeds is the bound on
differences. Each run is a call of pretrain_gpt.py, whose options are accepted too. Runs in --out
are not repeated. Do not start it with torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import prepare_data
from lib.bench_subjects import RECIPES, Subject, parse_subjects
from lib.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
OURS = "ours:optim_grads_params"
"""The wrapper that is the reference, in bf16."""
LAST = 20
"""Number of last steps whose losses are averaged."""
_OF_BF16 = f"{OURS}@bf16#1,{OURS}@bf16#2,{OURS}@bf16#3"
_OF_FP8 = [f"{OURS}@fp8w_{recipe}#1,ddp@fp8w_{recipe}#1" for recipe in RECIPES]
SETS = {
    "fp8": ",".join([_OF_BF16, f"{OURS}@fp8_tensorwise#1", *_OF_FP8]),
    "muon": f"{OURS}@bf16#1,ours-muon:optim_grads_params@bf16#1",
}
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#a9c6e8", "linewidth": 7.0},
    {"color": "#d1495b", "linewidth": 2.5},
    {"color": "black", "linewidth": 1.2, "linestyle": "--"},
)
"""Lines of a comparison, the first one lowest and widest, so that equal ones are seen."""
Log = dict[int, dict[str, Any]]
"""Iteration -> its numbers by name."""


def read_log(path: Path) -> Log:
    """Reads a log of `pretrain_gpt.py --loss-log-file`. Raises FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(
            f"loss log {path} does not exist. Train with --loss-log-file {path} first"
        )
    merged: Log = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        merged.setdefault(int(record["iteration"]), {}).update(record)
    return merged


LOSSES = ("loss", "validation_loss")
NUMBERS = (*LOSSES, "grad_norm")


def differences(first: Log, second: Log, names: Sequence[str] = NUMBERS) -> list[str]:
    """A line for each iteration that only one run has, or whose numbers differ in any bit."""
    lines = []
    for number in sorted({*first, *second}):
        one = first.get(number, {})
        other = second.get(number, {})
        for name in names:
            mine = one.get(name)
            theirs = other.get(name)
            if mine != theirs:
                lines.append(f"iteration {number}: {name} {mine!r} and {theirs!r}")
    return lines


def draw(
    logs: Mapping[str, Log],
    path: Path,
    styles: Sequence[Mapping[str, Any]] = (),
    resumed_at: int | None = None,
) -> None:
    """Plots loss over iterations, one curve per run, as a PNG. styles: of the curves, as matplotlib
    takes them. resumed_at: the iteration after which a run was stopped and resumed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for number, (label, log) in enumerate(logs.items()):
        steps = sorted(step for step, record in log.items() if "loss" in record)
        losses = [log[step]["loss"] for step in steps]
        style = styles[number] if styles else {"linewidth": 0.9}
        axes.plot(steps, losses, label=label, **style)
    if resumed_at is not None:
        axes.axvline(resumed_at, color="black", linestyle=":", linewidth=1)
        top = axes.get_ylim()[1]
        axes.annotate(
            "stopped, and resumed\nfrom the checkpoint",
            (resumed_at, top),
            xytext=(6, -6),
            textcoords="offset points",
            verticalalignment="top",
            fontsize=8,
        )
    axes.set(title="Training loss by run", xlabel="iteration", ylabel="loss (nats per byte)")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_runs(text: str) -> dict[str, tuple[Subject, int]]:
    """Parses runs as in "ours:optim@bf16#1,ddp@fp8w_delayed#1", or the name of a set; returns name
    -> wrapper and seed. Raises a ValueError that names the first invalid one."""
    runs = {}
    for name in SETS.get(text, text).split(","):
        wrapper, _, seed = name.partition("#")
        subject, *others = parse_subjects(wrapper)
        trains = subject.is_ours or subject.kind == "ddp"
        if others or not seed.isdigit() or subject.captures or not trains:
            raise ValueError(
                f"--runs {name}: must be ours or ddp, without graphs, a precision and a seed, as "
                f"{OURS}@fp8w_delayed#1"
            )
        runs[name] = subject, int(seed)
    return runs


def words_of(subject: Subject, seed: int) -> list[str]:
    """Flags of pretrain_gpt.py that select a wrapper and a seed."""
    options = {
        "use_megatron_fsdp": subject.is_ours,
        "seed": seed,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "data_parallel_sharding_strategy": subject.strategy,
        **subject.options(),
    }
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words


def table_text(logs: Mapping[str, Log]) -> tuple[str, bool]:
    """The table, a line for each run, and True if all are within the spread: no run differs from
    the reference of its seed by more than the reference's seeds differ among themselves."""
    finals = {name: _final_loss(log) for name, log in logs.items()}
    bases = {name: final for name, final in finals.items() if name.startswith(f"{OURS}@bf16#")}
    spread = max(bases.values(), default=0.0) - min(bases.values(), default=0.0)
    lines = [
        f"| run | mean loss of the last {LAST} steps | validation | less bf16, same seed |",
        "|---|---|---|---|",
    ]
    inside = True
    for name, log in logs.items():
        _, _, seed = name.partition("#")
        base = bases.get(f"{OURS}@bf16#{seed}")
        apart = ""
        if base is not None and name not in bases:
            apart = f"{finals[name] - base:+.4f}"
            if len(bases) > 1 and not abs(float(apart)) <= spread:
                inside = False
        valid = [one["validation_loss"] for one in log.values() if "validation_loss" in one]
        last = f"{valid[-1]:.4f}" if valid else ""
        lines.append(f"| {name} | {finals[name]:.4f} | {last} | {apart} |")
    lines.append(f"spread of the seeds of bf16: {spread:.4f}")
    return "\n".join(lines), inside


def _final_loss(log: Log) -> float:
    """The mean of the last losses."""
    losses = [log[step]["loss"] for step in sorted(log) if "loss" in log[step]]
    return fmean(losses[-LAST:])


def train(given: argparse.Namespace, rest: Sequence[str]) -> tuple[dict[str, Log], int]:
    """Trains the runs, and prints and writes the table. Returns the logs, and 0, or 1 if a run
    failed or differs by more than the spread of seeds. Raises ValueError for invalid runs, or if
    the text cannot be written."""
    runs = parse_runs(given.runs)
    prefix = given.out / "data" / "text"
    text = ["--output-prefix", str(prefix), "--max-bytes", "20000000"]
    if not Path(f"{prefix}_valid.idx").is_file() and prepare_data.main(text):
        raise ValueError(f"--out {given.out}: cannot write the text there")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # ours and DDP: the same kernels
    logs = {}
    failed = []
    for name, (subject, seed) in runs.items():
        path = given.out / f"{subject.file_name}-seed{seed}.jsonl"
        unfinished = path.with_suffix(".unfinished")
        command = [
            sys.executable,
            str(ROOT / "scripts" / "pretrain_gpt.py"),
            f"--config={given.config}",
            f"--train-data-path={prefix}_train",
            f"--valid-data-path={prefix}_valid",
            f"--data-cache-path={given.out / 'data' / 'cache'}",
            f"--loss-log-file={unfinished}",
            *words_of(subject, seed),
            *rest,
        ]
        if not path.is_file():
            failure = run_ranks(command, given.ranks, given.run_limit, path.with_suffix(".log"))
            if failure is not None:
                failed.append(f"{name}: not trained: {failure}")
                continue
            os.replace(unfinished, path)
        logs[name] = read_log(path)
    table, inside = table_text(logs)
    table = "\n".join([table, *failed])
    (given.out / "table.md").write_text(table + "\n")
    print(table)
    return logs, 1 if failed or not inside else 0


def compare(first: Log, second: Log) -> int:
    """Compares two logs; returns 0 if they agree, else prints the first differences and returns
    1."""
    found = differences(first, second)
    if found:
        print("\n".join(found[:10]), file=sys.stderr)
        return 1
    print(f"{len(first)} iterations: losses and gradient norms are equal bit for bit")
    return 0


def compare_with_ddp(ours: Log, ddp: Log) -> int:
    """Compares losses with those of Megatron's DDP, as `compare` does. Squares of gradients add up
    over shards in another order, so that the last digits of norms differ: prints how much."""
    found = differences(ours, ddp, LOSSES)
    if found:
        print("\n".join(["beside Megatron's DDP:", *found[:10]]), file=sys.stderr)
        return 1
    apart = 0.0
    for number, record in ours.items():
        norm = record.get("grad_norm")
        if norm:
            apart = max(apart, abs(norm - ddp[number]["grad_norm"]) / norm)
    print(
        f"{len(ours)} iterations beside Megatron's DDP: training and validation losses are equal "
        f"bit for bit, gradient norms to {apart:.0e} of their value"
    )
    return 0


def main(arguments: Sequence[str]) -> int:
    """Compares or trains. Returns 0; 1 if a run differs or failed; 2 for invalid options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--compare", type=Path, nargs=2, metavar="LOG", help="compare two logs instead of training")
    add("--ddp", type=Path, metavar="LOG", help="with --compare: a log of Megatron's DDP")
    add("--resumed-at", type=int, help="with --compare: iteration after which the second resumed")
    add("--png", type=Path, help="file for the plot")
    add("--out", type=Path, default=Path("runs/curves"), help="folder for text, logs and table")
    add("--runs", default="fp8", help=f"{', '.join(SETS)}, or WRAPPER@PRECISION#SEED, ...")
    add("--ranks", type=int, default=2, help="processes of a run; one per GPU")
    add("--config", default=ROOT / "configs" / "fp8-small.yaml", help="preset of the model")
    add("--run-limit", type=float, default=300.0, help="seconds of one run")
    given, rest = parser.parse_known_args(list(arguments))
    styles: tuple[dict[str, Any], ...] = ()
    try:
        if given.compare:
            first, second = map(read_log, given.compare)
            status = compare(first, second)
            logs = {}
            if given.ddp:
                logs["Megatron's DDP"] = read_log(given.ddp)
                status = max(status, compare_with_ddp(first, logs["Megatron's DDP"]))
            logs |= {given.compare[0].stem: first, given.compare[1].stem: second}
            styles = STYLES[-len(logs) :]
        else:
            logs, status = train(given, rest)
    except (ValueError, FileNotFoundError) as error:
        print(f"loss_curves.py: {error}", file=sys.stderr)
        return 2
    if given.png:
        draw(logs, given.png, styles, given.resumed_at)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
