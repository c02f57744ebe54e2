#!/usr/bin/env bash
# Megatron-LM's own pretrain_gpt.py, unmodified, with Transformer Engine on GPUs: stock DDP against
# the runner of this package, losses and gradient norms compared. Part `dropin` of gpu_bench.sh,
# whose environment (OUT, PYTHON, RANKS) it uses.
#
#   MEGATRON_LM_PATH=checkout OUT=folder bash scripts/gpu_dropin.sh
#
# Of the checkout (core_v0.16.1, core_v0.19.0) it needs pretrain_gpt.py, gpt_builders.py, model_provider.py and
# megatron/, 8 MB. It works in a copy of those, so that the index builder of megatron/core/datasets
# need not be compiled: the copy gets the one of the installed megatron-core.
# No full-iteration CUDA graph here: at core_v0.16.1 the script's own get_batch_on_this_tp_rank copies
# a number from the host for every microbatch, which cannot be captured under any wrapper.
# Also needed: the checkout's release of megatron-core, Transformer Engine, six, regex, pydantic.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${MEGATRON_LM_PATH:?names a checkout of Megatron-LM}"
OUT=${OUT:-runs/gpu}
PYTHON=${PYTHON:-python3}
RANKS=${RANKS:-2}
LIMIT=${LIMIT:-150} # seconds for each run
out=$(mkdir -p "$OUT/dropin" && cd "$OUT/dropin" && pwd)
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
# Required by --deterministic-mode: equal training must give equal digits.
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 NCCL_ALGO=^NVLS CUBLAS_WORKSPACE_CONFIG=:4096:8
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

cp -r "$MEGATRON_LM_PATH"/{pretrain_gpt.py,gpt_builders.py,model_provider.py,megatron} "$work" || exit 2
helpers=$(cd / && "$PYTHON" -c 'import megatron.core.datasets as d; print(d.__path__[0])') || exit 2
cp "$helpers"/helpers_cpp*.so "$work/megatron/core/datasets/" || exit 2
printf 'all:\n\t@true\n' > "$work/megatron/core/datasets/Makefile"

model=(--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512
  --max-position-embeddings 512 --position-embedding-type rope --normalization RMSNorm --swiglu
  --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0
  --attention-dropout 0 --transformer-impl transformer_engine)
training=(--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --min-lr 1e-4
  --lr-decay-iters 20 --train-iters 10 --eval-interval 5 --eval-iters 2 --log-interval 1
  --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --num-workers 0
  --distributed-timeout-minutes 2 --log-params-norm)
# One microbatch a rank and no clipping: then both wrappers add the same numbers in the same order,
# and fp32 training is to agree in every digit. With several, sums of microbatches and of ranks are
# taken in another order.
exact=(--deterministic-mode --global-batch-size 4 --clip-grad 1000)
moe=(--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 512
  --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none)

# shellcheck source=lib/ranks.sh
. scripts/lib/ranks.sh
export RANKS PYTHON

train() { # train NAME COMMAND... : with a row's own arguments last in COMMAND, where they win
  local name=$1 started=$SECONDS status=0
  shift
  (cd "$work" && timeout --kill-after=5 "$LIMIT" bash -c 'ranks "$@"' train "$@" \
    --data-cache-path "$work/cache_$name") > "$out/$name.log" 2>&1 || status=$?
  echo "$name status $status $((SECONDS - started)) s" | tee -a "$out/status.txt"
}
unfused=(--no-gradient-accumulation-fusion) # stock layers would need apex for it
stock() {
  train "$1" "$PYTHON" pretrain_gpt.py --use-distributed-optimizer \
    "${model[@]}" "${training[@]}" "${unfused[@]}" "${@:2}"
}
ours() {
  local fusion=("${unfused[@]}")
  [[ $1 == *_fused ]] && fusion=()
  train "$1" "$PYTHON" -m megatron_fsdp_adapter "$work/pretrain_gpt.py" --use-megatron-fsdp \
    "${model[@]}" "${training[@]}" "${fusion[@]}" "${@:2}"
}
compare() { "$PYTHON" tests/lib/integration/lm_log.py "$out/$1.log" "$out/$2.log" "${@:3}"; }

: > "$out/status.txt"
timeout 60 "$PYTHON" -m megatron_fsdp_adapter doctor > "$out/doctor.txt" 2>&1 &
# Small models: the runs of a row are on the GPUs together. Stock tensor parallelism needs one
# hardware queue.
stock ddp_fp32 "${exact[@]}" &
ours zero3_fp32 "${exact[@]}" &
ours zero1_fp32 "${exact[@]}" --data-parallel-sharding-strategy optim --overlap-grad-reduce &
stock ddp_bf16 "${exact[@]}" --bf16 &
ours zero3_bf16 "${exact[@]}" --bf16 --save "$work/ck" --save-interval 5 &
wait
stock moe_ddp --bf16 "${moe[@]}" --expert-model-parallel-size 2 &
ours moe_zero3 --bf16 "${moe[@]}" --expert-model-parallel-size 2 &
tp=(--tensor-model-parallel-size 2 --sequence-parallel)
CUDA_DEVICE_MAX_CONNECTIONS=1 stock tp_ddp "${exact[@]}" "${tp[@]}" &
ours tp_zero3 "${exact[@]}" "${tp[@]}" &
echo 5 > "$work/ck/latest_checkpointed_iteration.txt"
ours zero3_resumed "${exact[@]}" --bf16 --load "$work/ck" &
stock ddp_accumulate --deterministic-mode &
ours zero3_accumulate --deterministic-mode &
ours zero3_fused "${exact[@]}" --bf16 &
ours zero3_recompute "${exact[@]}" --bf16 --recompute-granularity full --recompute-method uniform \
  --recompute-num-layers 1 &
wait

# The second loss that Megatron-LM logs after a resume is averaged with the first: from the third on.
failed=0
{
  compare ddp_fp32 zero3_fp32 || failed=1
  compare ddp_fp32 zero1_fp32 || failed=1
  compare tp_ddp tp_zero3 || failed=1
  compare ddp_accumulate zero3_accumulate --tolerance 0.002 || failed=1
  compare zero3_bf16 zero3_resumed --from-iteration 8 || failed=1
  compare zero3_bf16 zero3_recompute || failed=1
  compare ddp_bf16 zero3_bf16 || failed=1
  compare ddp_bf16 zero3_fused --tolerance 0.02 || failed=1
  compare moe_ddp moe_zero3 --tolerance 0.02 || failed=1
} | tee "$out/verdict.txt"
sed -n '1,/^bindings/p' "$out/doctor.txt"
grep -A7 -m1 'fsdp sets' "$out/zero3_bf16.log"
for log in "$out"/*.log; do
  echo "-- $(basename "$log")"
  grep -E 'iteration +10/|^FullySh|Error' "$log" | cut -c1-260 | tail -4
done
! grep -q FAILED "$out/verdict.txt"
