#!/usr/bin/env bash
# Measurements and training on 2 GPUs or more: benchmark.py on the presets, the matrix, real training
# scripts. (Tests: gpu_check.sh.) Each part has its own time limit, so that one that hangs does not
# take the others with it; logs and tables go to $OUT, short tables are printed last.
#
#   OUT=folder bash scripts/gpu_bench.sh [part ...]
#   parts: bench8b bench1b matrix trace fp8_rows fp8_curves dropin moe moe_overlap (the last two
#   on 4 GPUs or more; dropin needs MEGATRON_LM_PATH, see gpu_dropin.sh)
#
# Environment: OUT (default runs/gpu), PYTHON (python3), RANKS (all GPUs), PRESET_8B, PRESET_1B,
# PRESET_MOE, MOE_EP and MOE_OVERLAP_EP (expert-parallel ranks; 4 and 2), and ARGS_8B,
# ARGS_1B, ARGS_MOE, ARGS_FP8 to change or add options of benchmark.py. Of `matrix` (docs/contributing/matrix.md):
# MATRIX_RESULTS (default $OUT/matrix.jsonl; what has ended there is not run again), MATRIX_SECONDS
# (560), and MATRIX, MATRIX_ARRAY and MATRIX_WIDTH of tests/gpu/test_gpu_matrix.py (all cells of gpu).
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/gpu}
PYTHON=${PYTHON:-python3}
RANKS=${RANKS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
PRESET_8B=${PRESET_8B:-configs/llama3-8b-8layers.yaml}
PRESET_1B=${PRESET_1B:-configs/llama-1.5b.yaml}
PRESET_MOE=${PRESET_MOE:-configs/mixtral-8x7b-8layers.yaml}
MOE_EP=${MOE_EP:-4}
MOE_OVERLAP_EP=${MOE_OVERLAP_EP:-2}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# NVLink multicast stays off, whatever starts this script.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
export NVSHMEM_DISABLE_NVLS=${NVSHMEM_DISABLE_NVLS:-1}

if [ "$RANKS" -lt 2 ]; then
  echo "gpu_bench.sh: RANKS is $RANKS: it needs 2 GPUs or more" >&2
  exit 2
fi

# part NAME SECONDS COMMAND...: runs it with a log, notes status and time. `timeout` signals its
# whole process group, so that no rank is left behind on a GPU.
part() {
  local name=$1 limit=$2 started=$SECONDS status=0
  shift 2
  timeout --kill-after=5 "$limit" "$@" > "$OUT/$name.log" 2>&1 || status=$?
  echo "$name status $status $((SECONDS - started)) s of $limit" | tee -a "$OUT/status.txt"
}

# shellcheck source=lib/ranks.sh
. scripts/lib/ranks.sh
export RANKS PYTHON OUT

bench() { # bench NAME SECONDS ARGUMENTS...
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" bash -c 'ranks "$PYTHON" scripts/benchmark.py "$@"' bench \
    --json "$OUT/$name.json" --distributed-timeout-minutes 2 "$@"
}

# On two GPUs. All ends after MATRIX_SECONDS; the table of outcomes ends the log.
do_matrix() {
  local seconds=${MATRIX_SECONDS:-560}
  export MATRIX=${MATRIX-} MATRIX_ARRAY=${MATRIX_ARRAY:-gpu} MATRIX_WIDTH=${MATRIX_WIDTH:-small}
  MEGATRON_FSDP_ADAPTER_POISON=1 part "matrix_$MATRIX_WIDTH" $((seconds + 30)) "$PYTHON" -m tests.gpu \
    --only matrix --results "${MATRIX_RESULTS:-$OUT/matrix.jsonl}" --log "$OUT" --time-limit "$seconds"
}

do_bench8b() {
  # shellcheck disable=SC2086
  bench bench8b 230 --preset "$PRESET_8B" --isolated --steps 5 --warmup 3 --repeats 5 \
    --wrappers ddp,ours:optim_grads_params,ours:optim,fsdp2,bundled,ours:optim_grads,ours:no_shard,floor \
    ${ARGS_8B:-}
}

do_bench1b() {
  # shellcheck disable=SC2086
  bench bench1b 75 --preset "$PRESET_1B" --isolated --steps 5 --warmup 3 --repeats 3 \
    --wrappers floor,ddp,ours:optim_grads_params,ours:optim,fsdp2 ${ARGS_1B:-}
}

do_trace() {
  # shellcheck disable=SC2086
  bench trace 60 --preset "$PRESET_8B" --isolated --steps 2 --warmup 2 --repeats 1 \
    --wrappers ours:optim_grads_params --profile "$OUT/trace" ${ARGS_8B:-}
}

# FP8 weights: rows in processes of their own (again with the same OUT goes on), and loss curves.
do_fp8_rows() {
  # shellcheck disable=SC2086
  part "fp8_rows" 600 "$PYTHON" scripts/benchmark.py --ranks 2 --row-limit 90 \
    --wrappers "${FP8_ROWS:-floor@fp8w_tensorwise,ours:optim_grads_params@fp8w_tensorwise,ours-ce-rs@fp8w_tensorwise,ddp@fp8w_tensorwise,bundled@fp8w_tensorwise,ours-ce-graph@fp8w_tensorwise,floor@bf16,ours:optim_grads_params@bf16,ddp@bf16}" \
    --time-limit "${FP8_SECONDS:-570}" --out "$OUT/fp8_rows" --preset configs/llama3-8b.yaml \
    --num-layers 24 --steps 3 --warmup 3 --repeats 3 ${ARGS_FP8:-}
}

do_fp8_curves() {
  part "fp8_curves" 600 "$PYTHON" scripts/loss_curves.py --ranks 2 --runs fp8 --out "$OUT/fp8_curves"
}

do_dropin() { # prints its own verdict
  RANKS=2 part dropin 420 bash scripts/gpu_dropin.sh
}

do_moe() {
  # shellcheck disable=SC2086
  bench "moe_ep$MOE_EP" 100 --preset "$PRESET_MOE" --expert-model-parallel-size "$MOE_EP" \
    --isolated --steps 3 --warmup 3 --repeats 3 \
    --wrappers ddp,ours:optim_grads_params,ours-ag:optim_grads_params,floor,bundled:optim_grads_params \
    ${ARGS_MOE:-}
}

# Experts on several data-parallel ranks, so that there is something to gather, and deterministic
# attention, so that equal training means equal bits. 4 layers show it as well as 8, in less time.
do_moe_overlap() {
  # shellcheck disable=SC2086
  NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 bench moe_overlap 60 --preset "$PRESET_MOE" \
    --expert-model-parallel-size "$MOE_OVERLAP_EP" --num-layers 4 --isolated --steps 3 \
    --warmup 2 --repeats 2 --wrappers ours:optim_grads_params,ours-ag:optim_grads_params \
    --profile "$OUT/moe_trace" ${ARGS_MOE:-}
}

for chosen in "${@:-bench8b bench1b}"; do
  for name in $chosen; do "do_$name"; done
done

echo; echo "== summary"
for log in "$OUT"/matrix_*.log; do
  [ -f "$log" ] && echo "-- $log" && sed -n '/ passed .* hung /,$p' "$log" | cut -c1-260
done
[ -f "$OUT/dropin.log" ] && cut -c1-260 "$OUT/dropin.log"
for log in "$OUT"/{bench8b,bench1b,trace,moe_ep*,moe_overlap}.log; do
  [ -f "$log" ] || continue
  echo "-- $log"
  if grep -q "rounds of" "$log"; then
    sed -n '/rounds of/,$p' "$log" | cut -c1-420
  else # cut short: the wrappers that were finished
    grep -A3 "^wrapper " "$log" | cut -c1-420
    tail -5 "$log" | cut -c1-300
  fi
done
for table in "$OUT/fp8_rows/rows.txt" "$OUT/fp8_curves/table.md"; do
  [ -f "$table" ] && echo "-- $table" && cut -c1-420 "$table"
done
cat "$OUT/status.txt"
