"""The matrix on the command line.

    python -m tests.matrix generate               # cells.json anew, after a change of the table
    python -m tests.matrix list [--array cpu]     # names of cells
    python -m tests.matrix run --array gpu --results FILE [--seconds 560] [--width real]
    python -m tests.matrix run --array cpu --results FILE --match layers=moe
    python -m tests.matrix count                  # pairs and rules, for docs/matrix.md
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from megatron_fsdp_adapter.core.config import poison_asked

from . import cells as arrays
from .cover import covered
from .table import ARRAYS, DIMENSIONS, MEANING, REFERENCE, RULES, name_of

WIDTHS = ("tiny", "small", "real")


def _chosen(options: argparse.Namespace) -> arrays.Cells:
    if options.cell:
        return [arrays.cell_named(name) for name in options.cell]
    found = arrays.cached(options.array)
    at, of = options.share
    return [c for c in found if all(word in name_of(c) for word in options.match)][at::of]


def _share(text: str) -> tuple[int, int]:
    at, _, of = text.partition("/")
    if not (at.isdigit() and of.isdigit() and int(at) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted is which of how many, as 0/4")
    return int(at), int(of)


def _run(options: argparse.Namespace) -> int:
    import torch

    from . import results, run

    cuda = torch.cuda.is_available() and options.device != "cpu"
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks inherit it
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    # A kernel that is loaded when it is first used waits for the device, and so for a receive that
    # another stream has begun: interleaved pipelines hang, stock DDP's too.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # Products in TF32 round what they read: a weight's last bit becomes 1e-4 of a gradient.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    width = options.width or ("small" if cuda else "tiny")
    setting = results.Setting(width, "cuda" if cuda else "cpu", poison_asked())
    wanted = _chosen(options)
    if options.again:
        _forget(options.results, wanted, setting, results)
    started = time.monotonic()
    found = run.run(wanted, setting, options.results, options.seconds, options.slowest)
    print(f"{time.monotonic() - started:.0f} s, results in {options.results}")
    last = results.known(found)
    ended = [last.get(setting.digest(cell)) for cell in wanted]
    return int(any(one is None or one.status != results.PASSED for one in ended))


def _forget(path, wanted, setting, results) -> None:  # type: ignore[no-untyped-def]
    """Takes out of the file what did not pass, so that it is run again."""
    again = {setting.digest(cell) for cell in wanted}
    kept = [
        one for one in results.read(path)
        if one.digest not in again or one.status == results.PASSED
    ]  # fmt: skip
    path.unlink(missing_ok=True)
    for one in kept:
        results.append(path, one)


def _count(options: argparse.Namespace) -> int:
    print("| dimension | values | what |\n|---|---|---|")
    for name, values in DIMENSIONS.items():
        print(f"| {name} | {', '.join(map(str, values))} | {MEANING[name]} |")
    print(f"\nReference: {', '.join(f'{n}={v}' for n, v in REFERENCE.items())}\n")
    print("| array | pairs | possible | in cells | excluded | cells |\n|---|---|---|---|---|---|")
    excluded: dict[str, dict[str, int]] = {rule.name: {} for rule in RULES}
    for array in ARRAYS:
        space, rows = arrays.space(array), arrays.cached(array)
        possible = set(space.possible_pairs)
        out = set(space.all_pairs) - possible
        print(
            f"| `{array}` | {len(space.all_pairs)} | {len(possible)} "
            f"| {len(covered(rows, space) & possible)} | {len(out)} | {len(rows)} |"
        )
        for pair in out:
            for rule in space.reasons(pair):
                excluded[rule.name][array] = excluded[rule.name].get(array, 0) + 1
    print("\n| rule | why |", *(f"`{array}` |" for array in ARRAYS))
    print("|---|---|" + "---|" * len(ARRAYS))
    for rule in RULES:
        numbers = [str(excluded[rule.name].get(array, 0)) for array in ARRAYS]
        print(f"| {rule.name} | {rule.reason} |", " | ".join(numbers), "|")
    return 0


def _generate(options: argparse.Namespace) -> int:
    made = arrays.computed()
    arrays.write(made)
    for array, rows in made.items():
        print(f"{array}: {len(rows)} cells")
    return 0


def _list(options: argparse.Namespace) -> int:
    print("\n".join(name_of(cell) for cell in _chosen(options)))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("generate", help="cells.json anew").set_defaults(act=_generate)
    commands.add_parser("count", help="pairs and rules, in Markdown").set_defaults(act=_count)
    listing = commands.add_parser("list", help="names of cells")
    running = commands.add_parser("run", help="train cells and compare them with stock DDP")
    for one, act in ((listing, _list), (running, _run)):
        one.set_defaults(act=act)
        one.add_argument("--array", choices=list(ARRAYS), default="cpu")
        one.add_argument("--match", nargs="*", default=[], help="words that a cell's name has")
        one.add_argument("--share", type=_share, default=(0, 1), help="0/4: every fourth cell")
        one.add_argument("--cell", nargs="*", default=[], help="names of cells, of any array")
    running.add_argument("--results", type=Path, required=True, help="lines of JSON; added to")
    running.add_argument("--seconds", type=float, default=1e9, help="no cell is begun after")
    running.add_argument(
        "--slowest", type=float, help="seconds a cell may take before its stacks are noted"
    )
    running.add_argument("--width", choices=WIDTHS, help="tiny on CPUs, small on GPUs")
    running.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is any")
    running.add_argument("--again", action="store_true", help="also what did not pass before")
    options = parser.parse_args(arguments)
    return int(options.act(options))


if __name__ == "__main__":
    sys.exit(main())
