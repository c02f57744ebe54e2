"""Compares the loss logs of two runs bit for bit and draws them.

A log has one JSON object a line, as `pretrain_gpt.py --loss-log-file` writes it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def read_log(path: Path) -> dict[int, dict[str, Any]]:
    """Iteration -> all that was logged of it; FileNotFoundError names a log that is not there."""
    if not path.is_file():
        raise FileNotFoundError(
            f"loss log {path} does not exist: train with --loss-log-file {path} first"
        )
    merged: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        merged.setdefault(int(record["iteration"]), {}).update(record)
    return merged


def differences(
    first: dict[int, dict[str, Any]], second: dict[int, dict[str, Any]], fields: tuple[str, ...]
) -> list[str]:
    """A line for each iteration that only one run has, or where a field differs in any bit."""
    lines = [f"iteration {n}: only in one log" for n in sorted(first.keys() ^ second.keys())]
    for number in sorted(first.keys() & second.keys()):
        for field in fields:
            one, other = first[number].get(field), second[number].get(field)
            if one != other:
                lines.append(f"iteration {number}: {field} {one!r} and {other!r}")
    return lines


def draw(logs: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Loss over iterations, one curve a run, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for (label, log), style in zip(logs.items(), ("-", "--", ":"), strict=False):
        iterations = sorted(log)
        axes.plot(iterations, [log[n]["loss"] for n in iterations], style, label=label)
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """0 if the logs agree, 1 with the first differences if not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path, help="log of the uninterrupted run")
    parser.add_argument("second", type=Path, help="log of the resumed run")
    parser.add_argument("--png", type=Path, help="where to draw both curves")
    arguments = parser.parse_args(argv)
    first, second = read_log(arguments.first), read_log(arguments.second)
    if arguments.png:
        draw({"uninterrupted": first, "saved and resumed": second}, arguments.png)
        print(f"loss curves: {arguments.png}")
    found = differences(first, second, ("loss", "grad_norm", "validation_loss"))
    if found:
        print("\n".join(found[:10]), file=sys.stderr)
        return 1
    print(f"{len(first)} iterations: losses and gradient norms are equal bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
