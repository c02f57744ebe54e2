"""Compares data-parallel wrappers: time, memory, and equality of training.

    torchrun --nproc-per-node 2 scripts/benchmark.py --num-layers 4 --hidden-size 512 \
        --num-attention-heads 8 --seq-length 256 --micro-batch-size 1
    torchrun --nproc-per-node 8 scripts/benchmark.py --preset configs/llama3-8b.yaml --isolated
    python scripts/benchmark.py --ranks 8 --out runs/8b --preset configs/llama3-8b.yaml

All wrappers train one model on the same batches of random tokens, in one process per rank; the
floor is forward and backward of each rank alone. With --ranks (without torchrun) each wrapper has
separate processes, so that one that hangs, crashes or runs out of memory affects no other row; rows
in --out are not measured again. Options beyond those of --help are those of pretrain_gpt.py
(--bf16, --transformer-impl, --micro-batch-size, ...).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_fsdp_adapter.core.runtime.launcher import is_first_rank

if not is_first_rank():
    warnings.simplefilter("ignore")  # once is enough

from lib.bench_subjects import DEFAULT, KINDS, parse_subjects
from lib.check import Machine, this_machine, validated
from lib.options import Options, parse, read_preset
from lib.ranks import run_ranks

from megatron_fsdp_adapter.plan.unsharded_budget import AUTO
from megatron_fsdp_adapter.tools.models.spec import flag

# Defaults of a benchmark. The command line overrides both. A preset overrides `DEFAULTS` only: its
# learning rate is for training with a warm-up, and diverges on two batches.
DEFAULTS = ("--train-iters=1", "--micro-batch-size=1")
LEARNING = ("--lr=1e-5", "--min-lr=0", "--lr-warmup-iters=0")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    meanings = "; ".join(f"{name}: {row.meaning}" for name, row in KINDS.items())
    add = parser.add_argument
    add("--preset", metavar="FILE", help="model preset (YAML, as for pretrain_gpt.py --config)")
    add("--wrappers", default=",".join(DEFAULT), help=f"comma-separated ({meanings})")
    add("--steps", type=int, default=5, help="steps of a block; one block is one sample")
    warm_up = "steps of each wrapper before the first block; at least 8 if a row has +auto"
    add("--warmup", type=int, default=3, help=warm_up)
    add("--repeats", type=int, default=7, help="rounds; each has one block of every wrapper")
    add("--num-microbatches", type=int, default=1, help="microbatches of a step on each rank")
    add(
        "--isolated",
        action="store_true",
        help=("one wrapper (and the floor) at a time, for large models"),
    )
    add("--profile", metavar="DIR", help="write a trace of one step of each")
    add("--json", type=Path, metavar="FILE", help="write all samples")
    add("--ranks", type=int, help="number of processes per wrapper, one per GPU")
    add(
        "--out",
        type=Path,
        default=Path("runs/benchmark"),
        help="with --ranks: folder for numbers and logs",
    )
    add("--row-limit", type=float, default=120.0, help="with --ranks: seconds of one wrapper")
    add("--time-limit", type=float, default=3600.0, help="with --ranks: seconds of all of them")
    return parser


AUTO_WARMUP = 8
"""Steps after which a budget of `auto` has been found, and layers that stay unsharded captured."""

COUNTS = ("steps", "warmup", "repeats", "num_microbatches")
"""Options that are numbers of repetitions, which a report records."""


def parse_arguments(arguments: Sequence[str], machine: Machine | None = None) -> argparse.Namespace:
    """The parsed command line. `subjects`, `options` and `machine` are derived from it; `rest` is
    the words that are passed on to the processes of a row. machine: default: that of this process.

    Raises ValueError or FileNotFoundError for invalid input.
    """
    given, rest = make_parser().parse_known_args(list(arguments))
    preset = [] if given.preset is None else read_preset(given.preset)
    for name in (*COUNTS, "ranks", "row_limit", "time_limit"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            raise ValueError(f"{flag(name)} {value}: must be above 0")
    given.machine = machine or this_machine()
    if given.ranks is not None:
        given.isolated = True
        given.machine = dataclasses.replace(given.machine, world_size=given.ranks)
    options = parse([*DEFAULTS, *preset, *LEARNING, *rest])
    given.options = common_options(options, given.num_microbatches, given.machine)
    given.subjects = parse_subjects(given.wrappers)
    if any(one.budget == AUTO for one in given.subjects):
        given.warmup = max(given.warmup, AUTO_WARMUP)
    given.rest = []
    for name in (*COUNTS, "preset", "profile"):
        value = getattr(given, name)
        if value:
            given.rest.append(f"{flag(name)}={value}")
    given.rest += rest
    return given


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """Settings common to the rows of a table, as plain values."""
    return {
        "plan": {name: getattr(given, name) for name in COUNTS},
        "options": dataclasses.asdict(given.options),
    }


def common_options(options: Options, num_microbatches: int, machine: Machine) -> Options:
    """The options of the model and the step, common to all wrappers. Options of data, logs and
    checkpoints have neutral values; so do those that make wrappers train differently (dropout) or
    wait for the host."""
    ranks = machine.world_size // options.tensor_model_parallel_size
    changed = dataclasses.replace(
        options,
        mock_data=True,
        train_data_path=None,
        valid_data_path=None,
        eval_iters=0,
        save=None,
        load=None,
        save_interval=None,
        exit_interval=None,
        loss_log_file=None,
        ckpt_format=None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        check_for_nan_in_loss_and_grad=False,
        use_megatron_fsdp=False,
        separate_all_gather_groups=False,
        tokenizer_type="ByteLevelTokenizer" if options.vocab_size is None else "NullTokenizer",
        global_batch_size=options.micro_batch_size * num_microbatches * ranks,
    )
    return validated(changed, machine)[0]


def measure(given: argparse.Namespace) -> bool:
    """Measures in this process group and reports. Returns True if all wrappers trained alike."""
    from lib import bench_report, distributed
    from lib.bench_measure import Bench

    place = distributed.start(given.options)

    def note(results) -> None:
        table = bench_report.rows(results, given, given.options)
        if place.first and given.json is not None:
            bench_report.write_json(given.json, table, settings(given), place.device)
        if place.first and given.isolated:
            print(bench_report.table_text(table[-1:]), file=sys.stderr, flush=True)

    def say(text: str) -> None:
        if place.first:
            print(text, file=sys.stderr, flush=True)

    try:
        results = Bench(given, given.options, place, say, note).run(given.subjects)
        table = bench_report.rows(results, given, given.options)
        if place.first:
            print(f"{title(given)}\n{bench_report.table_text(table)}", flush=True)
        return not any(row["flag"] for row in table)
    finally:
        distributed.stop()


def measure_apart(given: argparse.Namespace) -> bool:
    """Measures each wrapper in separate processes, one after the other. Returns True if all were
    measured and trained alike. Rows share no rounds, so ratios are of medians."""
    from lib import bench_report
    from lib.bench_measure import Result, reason
    from lib.bench_wrappers import row_options

    results = list[Result]()
    begin = time.monotonic()
    for subject in given.subjects:
        numbers = given.out / f"{subject.file_name}.json"
        words = ["--wrappers", subject.name, "--isolated", "--json", str(numbers), *given.rest]
        left = min(given.row_limit, given.time_limit - (time.monotonic() - begin))
        failure = None if left > 0 else "not begun: --time-limit is over"
        try:
            row_options(subject, given.options, given.machine)
        except ValueError as error:
            failure = reason(error)
        row = earlier(given, numbers)
        if row is None and failure is None:
            numbers.unlink(missing_ok=True)
            command = [sys.executable, __file__, *words]
            log = numbers.with_suffix(".log")
            failure = run_ranks(command, given.machine.world_size, left, log) or "no numbers"
            if numbers.is_file():
                row = json.loads(numbers.read_text())["rows"][0]
        found = Result(subject, error=failure)
        if row is not None:
            found = bench_report.from_plain(row)
        results.append(found)
        print(f"{subject.name}: {found.error or 'measured'}", file=sys.stderr, flush=True)
    # In place of the floor that each row measured itself: the median of the floor's own row.
    floors = {one.subject: median(one.seconds) for one in results if one.error is None}
    for one in results:
        base = floors.get(one.subject.floor)
        one.floor_seconds = []
        if base is not None:
            one.floor_seconds = [base] * len(one.seconds)
    table = bench_report.rows(results, given, given.options)
    text = f"{title(given)}\n{bench_report.table_text(table)}"
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "rows.txt").write_text(text + "\n")
    print(text, flush=True)
    return not any(row["flag"] or row["error"] for row in table)


def earlier(given: argparse.Namespace, numbers: Path) -> dict[str, Any] | None:
    """The row that an earlier call with the same settings wrote to `numbers`; None if none did,
    or it has an error."""
    if not numbers.is_file():
        return None
    content = json.loads(numbers.read_text())
    for name, value in settings(given).items():
        if content[name] != value:
            return None
    row: dict[str, Any] = content["rows"][0]
    return None if row["error"] else row


def title(given: argparse.Namespace) -> str:
    """A title of the measurement: an empty line, then two lines."""
    options = given.options
    mlp = f"ffn {options.ffn_hidden_size}"
    if options.num_experts is not None:
        mlp = (
            f"{options.num_experts} experts of {options.moe_ffn_hidden_size}, "
            f"top {options.moe_router_topk}, EP {options.expert_model_parallel_size}"
        )
    layout = "one wrapper at a time" if given.isolated else "all wrappers interleaved"
    precision = "bf16" if options.bf16 else "fp32"
    return (
        f"\n{options.num_layers} layers, hidden {options.hidden_size}, {mlp}, "
        f"seq {options.seq_length}, {given.num_microbatches} x {options.micro_batch_size} "
        f"sequences, {precision}, {options.transformer_impl}, "
        f"{given.machine.world_size} x {options.distributed_backend}\n"
        f"{given.repeats} rounds of {given.steps} steps, {layout}"
    )


def main(arguments: Sequence[str]) -> int:
    """Measures and prints. Returns 0; 1 if a wrapper trained differently, or, with --ranks, was not
    measured; 2 for invalid options."""
    try:
        given = parse_arguments(arguments)
    except (ValueError, FileNotFoundError) as error:
        if is_first_rank():
            print(f"benchmark.py: {error}", file=sys.stderr)
        return 2
    alike = measure(given) if given.ranks is None else measure_apart(given)
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
