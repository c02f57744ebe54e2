#!/usr/bin/env bash
# From nothing to a trained model: environment, data, a run on 2 processes, the same run interrupted
# and resumed, loss curves, and the memory that each strategy takes. At most 6 minutes on 2 cores.
#
# Usage: bash scripts/quickstart.sh          writes to runs/quickstart (or $OUT)
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # or each of the many processes recompiles torch and Megatron
out=${OUT:-runs/quickstart}
processes=2
say() { printf '\n== %s\n' "$*"; }

say "environment"
python=$(bash scripts/setup_env.sh train | tail -n 1)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
rm -rf "$out"
mkdir -p "$out"

say "data: the source code of Python's standard library, one token a byte"
"$python" scripts/prepare_data.py --output-prefix "$out/data/stdlib" --max-bytes 4000000

train() {  # train NAME FLAGS...: a run of the preset whose losses go to NAME.jsonl
  local name=$1
  shift
  "$python" -m torch.distributed.run --standalone --nproc_per_node "$processes" \
    scripts/pretrain_gpt.py --config configs/cpu-tiny.yaml --use-megatron-fsdp \
    --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor \
    --train-data-path "$out/data/stdlib_train" --valid-data-path "$out/data/stdlib_valid" \
    --data-cache-path "$out/data/cache" --loss-log-file "$out/$name.jsonl" "$@"
}

say "a run without interruption"
train uninterrupted

say "the same run: saved and stopped half way"
train resumed --save "$out/checkpoints" --save-interval 20 --exit-interval 40

say "and resumed from its last checkpoint"
train resumed --save "$out/checkpoints" --save-interval 40 --load "$out/checkpoints"

say "are the losses of both the same?"
"$python" scripts/loss_curves.py --compare "$out/uninterrupted.jsonl" "$out/resumed.jsonl" \
  --png "$out/losses.png"

say "memory of each strategy, bytes a rank"
"$python" -m megatron_fsdp_adapter estimate --config configs/cpu-tiny.yaml \
  --data-parallel-size "$processes" | tee "$out/memory.txt"

say "done: $out/losses.png, $out/memory.txt, checkpoints in $out/checkpoints"
