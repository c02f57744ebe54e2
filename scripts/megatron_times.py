"""Times Megatron-LM's own pretrain_gpt.py, unmodified, under several data-parallel wrappers.

    python scripts/megatron_times.py --checkout Megatron-LM --ranks 2 --model dsv3-proxy

Rows: `ddp`, Megatron's DDP with its distributed optimizer; `v1` and `v2`, Megatron's own FSDP and
its rewrite (from core 0.20 on); `ours`, this package. All of them shard everything (but `ddp`),
train in bf16 on mock data with the same seeds, and reduce gradients in float32.

The table has the median, the least and the most milliseconds of an iteration, the most memory that
rank 0 had allocated, and the loss and the gradient norm of the last iteration.

Needs GPUs, Transformer Engine, and the checkout's release of megatron-core.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]

WARM_UP = 5
"""Iterations that are not timed."""

FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"
)
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True)
class Row:
    """A wrapper: its flags. runner: `python -m megatron_fsdp_adapter` runs the script."""

    flags: str
    runner: bool = False


ROWS = {
    "ddp": Row(f"--use-distributed-optimizer {OVERLAP} --no-gradient-accumulation-fusion"),
    "v1": Row(f"{FSDP} {OVERLAP} --use-distributed-optimizer"),
    "v2": Row(f"{FSDP} --megatron-fsdp-version 2"),
    "ours": Row(FSDP, runner=True),
}

MODELS = {
    # The proxy of DeepSeek-V3 in Megatron-LM#7264, of 0.3B parameters.
    "dsv3-proxy": (
        "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 2816 "
        "--seq-length 512 --max-position-embeddings 512 --num-experts 32 --moe-router-topk 8 "
        "--moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 "
        "--moe-layer-freq ([0]*1+[1]*3) --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 1e-4 --moe-router-dtype fp32 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --multi-latent-attention --q-lora-rank 512 "
        "--kv-lora-rank 256 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
        "--qk-layernorm --expert-model-parallel-size 2"
    ),
    "llama3-8b-4layers": (
        "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --ffn-hidden-size 14336 --seq-length 4096 "
        "--max-position-embeddings 4096"
    ),
}

COMMON = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--transformer-impl transformer_engine --bf16 --micro-batch-size 1 --lr 1e-4 --min-lr 1e-5 "
    "--lr-decay-style cosine --clip-grad 1.0 --eval-iters 0 --eval-interval 1000 "
    "--log-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 32767 "
    "--num-workers 1 --distributed-timeout-minutes 2"
)

COPIED = ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py", "megatron")


@dataclass(frozen=True)
class Times:
    """Numbers of a log. milliseconds: of each timed iteration; gib: the most memory allocated, None
    if it is not printed; loss, norm: of the last iteration, as printed."""

    milliseconds: tuple[float, ...]
    gib: float | None
    loss: str
    norm: str


_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*")
_MILLISECONDS = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
_MEMORY = re.compile(r"\[Rank 0\].* max allocated: ([0-9.]+)")
_VALUE = re.compile(r"(lm loss|grad norm): ([-+0-9.eEnaif]+)")


def times_of(log: str) -> Times:
    """The times, the memory and the last values of a log. ValueError if no iteration is timed."""
    milliseconds = []
    values: dict[str, str] = {}
    for line in _ITERATION.finditer(log):
        values = dict(_VALUE.findall(line[0]))
        timed = _MILLISECONDS.search(line[0])
        if timed and int(line[1]) > WARM_UP:
            milliseconds.append(float(timed[1]))
    if not milliseconds:
        raise ValueError(f"the log has no iteration after iteration {WARM_UP}")
    memory = [float(found) for found in _MEMORY.findall(log)]
    gib = max(memory) / 1024 if memory else None
    return Times(tuple(milliseconds), gib, values.get("lm loss", "-"), values.get("grad norm", "-"))


def line_of(name: str, times: Times) -> str:
    """A line of the table."""
    least = min(times.milliseconds)
    most = max(times.milliseconds)
    memory = "-" if times.gib is None else f"{times.gib:.2f}"
    return (
        f"{name:6} {statistics.median(times.milliseconds):9.1f} {least:8.1f} {most:8.1f} "
        f"{memory:>9} {times.loss:>13} {times.norm:>8}"
    )


HEAD = f"{'row':6} {'ms':>9} {'min':>8} {'max':>8} {'peak GiB':>9} {'last loss':>13} {'norm':>8}"


def command_of(row: Row, model: str, script: Path, given: argparse.Namespace) -> list[str]:
    """The command line of a row's processes."""
    start = [sys.executable]
    if row.runner:
        start += ["-m", "megatron_fsdp_adapter"]
    batch = given.ranks * given.num_microbatches
    lengths = (
        f"--train-iters {given.iterations} --lr-decay-iters {given.iterations} "
        f"--global-batch-size {batch}"
    )
    flags = " ".join((COMMON, MODELS[model], row.flags, lengths))
    return [*start, str(script), *flags.split(), *given.rest]


def copy_of(checkout: Path, folder: Path) -> Path:
    """The script, in a copy of what it needs of the checkout. The copy has the index builder of the
    installed megatron-core, so that nothing is compiled."""
    for name in COPIED:
        source = checkout / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy(source, folder / name)
    found = importlib.util.find_spec("megatron.core.datasets")
    if found is None or not found.submodule_search_locations:
        raise ValueError("megatron-core is not installed. Run pip install megatron-core")
    datasets = folder / "megatron" / "core" / "datasets"
    for built in Path(found.submodule_search_locations[0]).glob("helpers_cpp*.so"):
        shutil.copy(built, datasets / built.name)
    (datasets / "Makefile").write_text("all:\n\t@true\n")
    return folder / "pretrain_gpt.py"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkout", type=Path, required=True, help="of Megatron-LM")
    add("--rows", default=",".join(ROWS), help=f"with commas, of {', '.join(ROWS)}")
    add("--model", choices=MODELS, default="dsv3-proxy", help="the model that is trained")
    add("--ranks", type=int, default=2, help="processes, one per GPU")
    add("--num-microbatches", type=int, default=2, help="microbatches of a step on each rank")
    add("--iterations", type=int, default=20, help=f"of a run; the first {WARM_UP} do not count")
    add("--row-limit", type=float, default=120.0, help="seconds of a row")
    add("--out", type=Path, default=Path("runs/megatron_times"), help="folder for logs")
    add("--flags", default="", help="more flags of pretrain_gpt.py, for every row")
    given = parser.parse_args(list(arguments))
    given.rest = shlex.split(given.flags)
    unknown = [name for name in given.rows.split(",") if name not in ROWS]
    if unknown:
        parser.error(f"--rows {given.rows}: {unknown[0]!r} is unknown. Use {', '.join(ROWS)}")
    if given.iterations <= WARM_UP:
        parser.error(f"--iterations {given.iterations}: must be above {WARM_UP}")
    if not (given.checkout / "pretrain_gpt.py").is_file():
        parser.error(f"--checkout {given.checkout}: has no pretrain_gpt.py")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(sys.argv[1:] if arguments is None else arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    lines = [f"{given.model}, {given.ranks} ranks, {given.num_microbatches} microbatches", HEAD]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        script = copy_of(given.checkout.resolve(), Path(folder))
        # The checkout's megatron, and this package, before what is installed.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            (folder, str(ROOT), os.environ.get("PYTHONPATH", ""))
        )
        for name in given.rows.split(","):
            log = given.out / f"{name}.log"
            command = command_of(ROWS[name], given.model, script, given)
            command += ["--data-cache-path", f"{folder}/cache-{name}"]
            problem = run_ranks(command, given.ranks, given.row_limit, log)
            try:
                lines.append(line_of(name, times_of(log.read_text(errors="replace"))))
            except ValueError as error:
                failed = 1
                lines.append(f"{name}: not measured: {problem or error}")
            print(lines[-1], flush=True)
    (given.out / "table.txt").write_text("\n".join(lines) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
