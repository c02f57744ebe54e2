#!/usr/bin/env bash
# From nothing to a trained model: environment, data, a run on 2 processes with Megatron's DDP, the
# same run sharded, the sharded run interrupted and resumed, loss curves of all, and the memory that
# each strategy takes. At most 6 minutes on 2 cores.
#
# Usage: bash scripts/quickstart.sh          writes to runs/quickstart (or $OUT)
set -euo pipefail
cd "$(dirname "$0")/.."
export CUDA_VISIBLE_DEVICES= # it trains on CPUs: two processes would need two GPUs
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

pretrain() {  # pretrain NAME FLAGS...: a run of the preset whose losses go to NAME.jsonl
  local name=$1
  shift
  # A microbatch of 8 on each rank, and no clipping: both wrappers then add the same gradients in the
  # same order, and losses may be compared bit for bit.
  "$python" -m torch.distributed.run --standalone --nproc_per_node "$processes" \
    scripts/pretrain_gpt.py --config configs/cpu-tiny.yaml --train-iters 60 --eval-interval 30 \
    --micro-batch-size 8 --clip-grad 0 --data-cache-path "$out/data/cache" \
    --train-data-path "$out/data/stdlib_train" --valid-data-path "$out/data/stdlib_valid" \
    --loss-log-file "$out/$name.jsonl" "$@"
}

sharded=(--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor)

say "Megatron's DDP: the run without the flag"
pretrain ddp

say "the same run, sharded (ZeRO-3)"
pretrain sharded "${sharded[@]}"

say "the sharded run again: saved and stopped half way"
pretrain sharded-resumed "${sharded[@]}" --save "$out/checkpoints" --save-interval 15 --exit-interval 30

say "and resumed from its last checkpoint"
pretrain sharded-resumed "${sharded[@]}" --save "$out/checkpoints" --save-interval 30 --load "$out/checkpoints"

say "are the losses of all the same?"
"$python" scripts/loss_curves.py --compare "$out/sharded.jsonl" "$out/sharded-resumed.jsonl" \
  --ddp "$out/ddp.jsonl" --resumed-at 30 --png "$out/losses.png"

say "memory that each strategy would take for Llama-3 8B on 8 GPUs"
"$python" -m megatron_fsdp_adapter estimate --preset llama3-8b --data-parallel-size 8 | tee "$out/memory.txt"

say "done: $out/losses.png, $out/memory.txt, checkpoints in $out/checkpoints"
