"""Reads the log of Megatron-LM's training scripts, and compares two of them.

    python tests/lib/integration/lm_log.py FIRST SECOND [--tolerance 0.001] [--from-iteration 3]

Compared are losses and norms of the iterations, and losses of evaluations. Without a
tolerance they must agree in every printed digit. Status 1 if they do not, or if there are none.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|")
_FIELD = re.compile(r"(lm loss|grad norm|params norm): ([-+0-9.eEnaif]+)")
_EVALUATION = re.compile(
    r"(validation|test) loss at iteration (\d+)(?: on (\w+) set)? \| lm loss value: (\S+)"
)

Values = dict[tuple[int, str], str]
"""(iteration, what) -> the number as it was printed."""


def read(text: str) -> Values:
    """All losses and norms of a log."""
    values: Values = {}
    for line in text.splitlines():
        iteration = _ITERATION.search(line)
        if iteration:
            for what, number in _FIELD.findall(line):
                values[int(iteration[1]), what] = number
        evaluation = _EVALUATION.search(line)
        if evaluation:
            _, number, split, value = evaluation.groups()
            values[int(number), f"{split or 'periodic'} evaluation"] = value
    return values


def differences(
    first: Values,
    second: Values,
    tolerance: float | None = None,
    start: int = 1,
    last_digit: int = 0,
) -> list[str]:
    """A line for each value from iteration `start` on that only one log has, or that differs:
    relatively by more than `tolerance`, or, without one, by more than `last_digit` units of the
    last printed digit."""
    wanted = {key for key in first if key[0] >= start}
    found = {key for key in second if key[0] >= start}
    lines = [f"iteration {n}: {what} only in one log" for n, what in sorted(wanted ^ found)]
    for key in sorted(wanted & found):
        one = first[key]
        other = second[key]
        if tolerance is None:
            allowed = _unit(one) * last_digit
        else:
            allowed = abs(float(one)) * tolerance
        if one != other and not abs(float(one) - float(other)) <= 1.001 * allowed:
            lines.append(f"iteration {key[0]}: {key[1]} {one} and {other}")
    return lines


def _unit(number: str) -> float:
    """What the last printed digit of "5.790631E+00" stands for."""
    mantissa, _, exponent = number.partition("E")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--from-iteration", type=int, default=1)
    args = parser.parse_args(argv)
    first, second = (read(path.read_text()) for path in (args.first, args.second))
    found = differences(first, second, args.tolerance, args.from_iteration)
    compared = [key for key in first.keys() & second.keys() if key[0] >= args.from_iteration]
    same = sum(first[key] == second[key] for key in compared)
    if args.tolerance is None:
        how = "every printed digit"
    else:
        how = f"{args.tolerance:g} relative"
    verdict = "FAILED" if found or not compared else "equal"
    print(
        f"{verdict}: {args.first.stem} and {args.second.stem}, {len(compared)} values, {same} of "
        f"them in every digit; wanted: {how}"
    )
    for line in found[:20]:
        print(f"  {line}")
    return int(verdict == "FAILED")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
