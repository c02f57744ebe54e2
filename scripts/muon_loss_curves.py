"""Train a small GPT on real text with Muon and with AdamW, and compare the loss curves.

    python scripts/muon_loss_curves.py --ranks 2 --out runs/muon-curves --time-limit 590
    python scripts/muon_loss_curves.py --ranks 2 --out runs/muon-curves \\
        --config configs/muon-cpu.yaml --run-limit 3000                  # without GPUs

500 steps of the same model from the same weights on the same text, the source of Python's standard
library, for each learning rate of ``--rates``. Updates of Muon's are scaled to the size of Adam's.
Each rate has a folder in ``--out``, and what is there already is not trained again; one picture
shows all of them. Other options are those of fp8_loss_curves.py, which trains, and of
pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import fp8_loss_curves
from compare_losses import read_log
from lib.loss_curves import Log, parse_runs, smoothed

RUNS = "ours:optim_grads_params@bf16#1,ours-muon:optim_grads_params@bf16#1"
RATES = "1e-3,3e-3"


def draw(logs: Mapping[str, Log], path: Path) -> None:
    """Losses by step, means of neighbouring steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, log in logs.items():
        steps = sorted(step for step, record in log.items() if "loss" in record)
        style = "-" if "muon" in name else "--"
        values = smoothed([log[step]["loss"] for step in steps])
        axes.plot(steps, values, style, linewidth=0.9, label=name)
    axes.set(xlabel="step", ylabel="training loss (nats per byte), mean of 10 steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def found_logs(out: Path, rates: Sequence[str], runs: str) -> dict[str, Log]:
    """Of the runs that have ended, by name and learning rate."""
    return {
        f"{run.subject.kind}, {rate}": read_log(path)
        for rate in rates
        for run in parse_runs(runs)
        if (path := out / rate / f"{run.file_name}.jsonl").is_file()
    }


def main(arguments: Sequence[str]) -> int:
    """Exit status: the largest of fp8_loss_curves.py's."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and picture")
    parser.add_argument("--rates", default=RATES, help="learning rates (default %(default)s)")
    parser.add_argument("--runs", default=RUNS, help="WRAPPER@PRECISION#SEED, ...")
    parser.add_argument("--train-iters", default="500", help="steps (default %(default)s)")
    parser.add_argument("--run-limit", default="150", help="seconds of a run (default %(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=3600.0, help="seconds of all runs at all rates"
    )
    given, rest = parser.parse_known_args(list(arguments))
    rates, began = given.rates.split(","), time.monotonic()
    shared = [
        "--runs", given.runs, "--train-iters", given.train_iters, "--run-limit", given.run_limit,
        "--data", str(given.out / "data"), *rest,
    ]  # fmt: skip
    status = 0
    for rate in rates:
        left = given.time_limit - (time.monotonic() - began)
        if left <= 0:
            print(f"learning rate {rate}: not trained: --time-limit is over", file=sys.stderr)
            status = max(status, 1)
            continue
        print(f"learning rate {rate}", flush=True)
        options = ["--out", str(given.out / rate), "--time-limit", str(left)]
        end = ["--lr", rate, "--min-lr", str(float(rate) / 10)]
        status = max(status, fp8_loss_curves.main([*options, *end, *shared]))
    logs = found_logs(given.out, rates, given.runs)
    if logs and find_spec("matplotlib") is not None:
        draw(logs, given.out / "curves.png")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
