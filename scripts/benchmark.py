"""Measure data-parallel wrappers beside each other: time, memory, and whether they train alike.

    torchrun --nproc-per-node 2 scripts/benchmark.py --num-layers 4 --hidden-size 512 \
        --num-attention-heads 8 --seq-length 256 --micro-batch-size 1
    torchrun --nproc-per-node 8 scripts/benchmark.py --preset configs/llama3-8b.yaml --isolated

All wrappers train one model on the same batches of random tokens, in one process a rank; the
floor is forward and backward of each rank alone. Options beyond those of ``--help`` are those of
pretrain_gpt.py (``--bf16``, ``--transformer-impl``, ``--micro-batch-size``, ...).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if int(os.environ.get("RANK", "0")) != 0:
    warnings.simplefilter("ignore")  # once is enough

from lib.bench_subjects import DEFAULT, KINDS, Plan, Subject, parse_subjects
from lib.check import Machine, this_machine, validated
from lib.options import Options, parse, read_preset

# What a benchmark does not need to be told. The preset comes after the first, the command line
# after both: a preset's learning rate is for training with a warm-up, and makes two batches chaos.
DEFAULTS = ("--train-iters=1", "--micro-batch-size=1")
LEARNING = ("--lr=1e-5", "--min-lr=0", "--lr-warmup-iters=0")


@dataclass(frozen=True)
class Settings:
    """The options of the benchmark itself."""

    subjects: list[Subject]
    plan: Plan
    json: Path | None
    plot: Path | None


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
    add("--warmup", type=int, default=3, help="steps of each wrapper before the first block")
    add("--repeats", type=int, default=7, help="rounds; each has one block of every wrapper")
    add("--num-microbatches", type=int, default=1, help="microbatches of a step on each rank")
    add("--isolated", action="store_true", help="one wrapper (and the floor) at a time, for models "
        "that do not fit beside each other")  # fmt: skip
    add("--separate-all-gather-groups", action="store_true", help="every wrapper of ours is "
        "ours-ag")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write all samples")
    add("--plot", type=Path, metavar="FILE", help="write a bar chart (PNG)")
    add("--profile", type=Path, metavar="DIR", help="write a trace of one step of each of ours")
    return parser


def parse_arguments(arguments: Sequence[str]) -> tuple[Settings, Options]:
    """Raises ValueError or FileNotFoundError for what is not understood."""
    known, rest = make_parser().parse_known_args(list(arguments))
    preset = [] if known.preset is None else read_preset(known.preset)
    options = parse([*DEFAULTS, *preset, *LEARNING, *rest])
    plan = Plan(
        known.steps, known.warmup, known.repeats, known.num_microbatches, known.isolated,
        known.profile,
    )  # fmt: skip
    subjects = parse_subjects(known.wrappers)
    if known.separate_all_gather_groups:
        subjects = list(dict.fromkeys(one.with_separate_gathers() for one in subjects))
    return Settings(subjects, plan, known.json, known.plot), options


def common_options(
    options: Options, num_microbatches: int, machine: Machine | None = None
) -> Options:
    """The options of the model and the step; whatever concerns data, logs and checkpoints, and
    what would make wrappers train differently (dropout) or wait for the host, is taken out.
    `machine`: default that which this process finds."""
    machine = machine or this_machine()
    ranks = machine.world_size // options.tensor_model_parallel_size
    changed = dataclasses.replace(
        options,
        mock_data=True, train_data_path=None, valid_data_path=None,
        eval_iters=0, save=None, load=None, save_interval=None, exit_interval=None,
        loss_log_file=None, ckpt_format=None,
        hidden_dropout=0.0, attention_dropout=0.0, check_for_nan_in_loss_and_grad=False,
        use_megatron_fsdp=False, separate_all_gather_groups=False,
        tokenizer_type="ByteLevelTokenizer" if options.vocab_size is None else "NullTokenizer",
        global_batch_size=options.micro_batch_size * num_microbatches * ranks,
    )  # fmt: skip
    return validated(changed, machine)[0]


def run(settings: Settings, options: Options) -> bool:
    """Measures and reports. True if every wrapper that ran trained like the reference."""
    # Imported here so that bad options are told at once: megatron-core takes seconds to import.
    from lib import bench_report, distributed
    from lib.bench_measure import Bench

    plan = settings.plan
    place = distributed.start(options)

    def say(text: str) -> None:
        if place.first:
            print(text, file=sys.stderr, flush=True)

    def note(results) -> None:
        table = bench_report.rows(results, plan, options)
        if place.first and settings.json is not None:
            bench_report.write_json(settings.json, table, plan, options, place)
        if plan.isolated:
            say(bench_report.table_text(table[-1:], bench_report.unit_of(place)))

    try:
        results = Bench(options, plan, place, say, note).run(settings.subjects)
        table = bench_report.rows(results, plan, options)
        if place.first:
            _report(settings, options, place, table)
        return not any(getattr(row, "flag", False) for row in table)
    finally:
        distributed.stop()


def _report(settings: Settings, options: Options, place, table) -> None:
    from lib import bench_report

    plan = settings.plan
    unit = bench_report.unit_of(place)
    dtype = "bf16" if options.bf16 else "fp32"
    mlp = f"ffn {options.ffn_hidden_size}"
    if options.num_experts is not None:
        mlp = (
            f"{options.num_experts} experts of {options.moe_ffn_hidden_size}, "
            f"top {options.moe_router_topk}, EP {options.expert_model_parallel_size}"
        )
    title = (
        f"{options.num_layers} layers, hidden {options.hidden_size}, "
        f"{mlp}, seq {options.seq_length}, "
        f"{plan.num_microbatches} x {options.micro_batch_size} sequences, "
        f"{dtype}, {options.transformer_impl}, {place.world_size} x {place.device.type}"
    )
    layout = "one wrapper at a time" if plan.isolated else "all wrappers interleaved"
    print(f"\n{title}\n{plan.repeats} rounds of {plan.steps} steps, {layout}")
    print(bench_report.table_text(table, unit), flush=True)
    if settings.plot is not None:
        bench_report.plot(settings.plot, table, title, unit)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0; 1 when a wrapper trained differently; 2 for options that cannot work."""
    try:
        settings, options = parse_arguments(arguments)
        options = common_options(options, settings.plan.num_microbatches)
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"benchmark.py: {error}", file=sys.stderr)
        return 2
    return 0 if run(settings, options) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
