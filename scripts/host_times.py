"""What a training step costs the host, beside the bare model and stock DDP: no GPU is needed.

    python scripts/host_times.py
    python scripts/host_times.py --checkout /path/to/another/checkout

Streams, events and collectives are pretended (lib/pretended_cuda.py), operations are on tiny
tensors: what is left is Python and launches. Microseconds of processor time of a layer, over those
of the bare model, in forward and backward, and of the optimizer's step; of many steps the least and
the median. With ``--checkout`` the package of another checkout is measured too, in turns. Options
beyond those of ``--help`` are those of pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OWN = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers=16", "--hidden-size=64", "--ffn-hidden-size=128", "--num-attention-heads=4",
    "--group-query-attention", "--num-query-groups=2", "--seq-length=8", "--bf16", "--swiglu",
    "--normalization=RMSNorm", "--position-embedding-type=rope", "--disable-bias-linear",
    "--untie-embeddings-and-output-weights", "--vocab-size=256", "--tokenizer-type=NullTokenizer",
    "--make-vocab-size-divisible-by=8", "--transformer-impl=local",
    "--suggested-communication-unit-size=0",  # what is told of a layer is of a unit
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--wrappers", default="floor,ddp,ours:optim_grads_params", help="the first is what the "
        "others are compared with")  # fmt: skip
    add("--steps", type=int, default=30, help="steps of each wrapper")
    add("--rounds", type=int, default=1, help="processes of each checkout, in turns")
    add("--checkout", type=Path, action="append", default=[], help="another one, to compare with")
    add("--in-process", action="store_true", help="measure here, print JSON")
    return parser


def measure(wrappers: str, steps: int, arguments: Sequence[str]) -> dict[str, Any]:
    """By wrapper: seconds of (forward and backward, optimizer) of each step, and calls of one."""
    from lib import bench_wrappers, distributed, pretended_cuda
    from lib.bench_measure import make_batches
    from lib.bench_subjects import parse_subjects

    options = _options(arguments)
    place = pretended_cuda.start(2)
    distributed.seed_everything(options.seed)
    batches = make_batches(options, 1, place)[0]
    subjects = parse_subjects(wrappers)
    runners = [bench_wrappers.build(subject, options, place) for subject in subjects]
    found: dict[str, Any] = {}

    def step(runner: Any) -> tuple[float, float]:
        started = time.thread_time()
        runner.forward_backward(batches)
        between = time.thread_time()
        runner.optimize()
        return between - started, time.thread_time() - between

    for runner in runners:
        for _ in range(4):
            pretended_cuda.COUNTS.clear()
            step(runner)
        found[runner.subject.name] = {"calls": dict(pretended_cuda.COUNTS), "seconds": []}
    for _ in range(steps):
        for runner in runners:
            found[runner.subject.name]["seconds"].append(step(runner))
    return {"layers": options.num_layers, "wrappers": found}


def _options(arguments: Sequence[str]) -> Any:
    import dataclasses

    import benchmark
    from lib.check import this_machine

    _, options = benchmark.parse_arguments([*MODEL, *arguments])
    machine = dataclasses.replace(this_machine(), world_size=2)
    return benchmark.common_options(options, 1, machine)


def elsewhere(package: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """`measure` with the package of a checkout and this script, in a process of its own."""
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, "--in-process", *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A line for each checkout and wrapper."""
    lines = [f"{'us of the host':34} {'a layer: least':>15} {'median':>8} {'optimizer':>10}"]
    for checkout, runs in found.items():
        floor, *others = runs[0]["wrappers"]
        for name in others:
            over, optimizer = [], []
            for run in runs:
                pairs = zip(
                    run["wrappers"][name]["seconds"], run["wrappers"][floor]["seconds"],
                    strict=True,
                )  # fmt: skip
                mine, bare = zip(*[(one[0], other[0]) for one, other in pairs], strict=True)
                optimizer += [one[1] for one in run["wrappers"][name]["seconds"]]
                per_layer = 1e6 / run["layers"]
                over.append((per_layer * (min(mine) - min(bare)), per_layer
                             * (statistics.median(mine) - statistics.median(bare))))
            least, middle = (min(column) for column in zip(*over, strict=True))
            lines.append(f"{checkout + ' ' + name:34} {least:15.0f} {middle:8.0f} "
                         f"{1e6 * min(optimizer):10.0f}")
            calls = runs[0]["wrappers"][name]["calls"]
            if calls:
                lines.append("    of a step: " + ", ".join(f"{k} {v}" for k, v in calls.items()))
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Exit status 0; an error of a checkout's process is raised."""
    known, rest = make_parser().parse_known_args(list(arguments))
    if known.in_process:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(known.wrappers, known.steps, rest)))
        return 0
    told = [f"--wrappers={known.wrappers}", f"--steps={known.steps}", *rest]
    found: dict[str, list[Any]] = {}
    for _ in range(known.rounds):
        for package in (OWN, *known.checkout):
            label = "here" if package == OWN else package.name
            found.setdefault(label, []).append(elsewhere(package, told))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
