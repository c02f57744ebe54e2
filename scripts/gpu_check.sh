#!/usr/bin/env bash
# Everything that needs GPUs, on one machine of 2 or more: the tests under tests/gpu, then
# benchmark.py on the 8-layer Llama preset. Each part has its own time limit, so that one that hangs
# does not take the others with it; logs, tables and charts go to $OUT, short tables are printed last.
#
#   OUT=folder bash scripts/gpu_check.sh [part ...]       parts: tests bench8b bench1b trace
#
# Environment: OUT (default runs/gpu), PYTHON (python3), RANKS (all GPUs), PRESET_8B, PRESET_1B,
# and *_ARGS_8B / *_ARGS_1B to change or add options of benchmark.py.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/gpu}
PYTHON=${PYTHON:-python3}
RANKS=${RANKS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
PRESET_8B=${PRESET_8B:-configs/llama3-8b-8layers.yaml}
PRESET_1B=${PRESET_1B:-configs/llama-1.5b.yaml}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# NVLink multicast stays off, whatever starts this script.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
export NVSHMEM_DISABLE_NVLS=${NVSHMEM_DISABLE_NVLS:-1}

if [ "$RANKS" -lt 2 ]; then
  echo "gpu_check.sh: RANKS is $RANKS: it needs 2 GPUs or more" >&2
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

# ranks COMMAND...: one process a GPU. In place of torchrun, whose workers are in sessions of their
# own and outlive a killed launcher.
ranks() {
  local rank status=0 pids=()
  export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 20000)) WORLD_SIZE=$RANKS
  for ((rank = 0; rank < RANKS; rank++)); do
    RANK=$rank LOCAL_RANK=$rank "$@" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return "$status"
}
export -f ranks
export RANKS PYTHON OUT

bench() { # bench NAME SECONDS ARGUMENTS...
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" bash -c 'ranks "$PYTHON" scripts/benchmark.py "$@"' bench \
    --json "$OUT/$name.json" --plot "$OUT/$name.png" --distributed-timeout-minutes 2 "$@"
}

do_tests() { # together: they check numbers, not times
  local name
  for name in numerics habits memory te; do
    part "test_gpu_$name" 185 "$PYTHON" -m pytest -q -rA --tb=short -p no:cacheprovider \
      "tests/gpu/test_gpu_$name.py" &
  done
  wait
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

for chosen in "${@:-tests bench8b bench1b}"; do
  for name in $chosen; do "do_$name"; done
done

echo; echo "== summary"
for log in "$OUT"/test_gpu_*.log; do
  [ -f "$log" ] || continue
  echo "-- $log"
  grep -hE " \([0-9.]+ s\)$" "$log" | cut -c1-200 | sort -u | tail -25
  grep -E "^(FAILED|ERROR)|[0-9]+ (passed|failed|skipped|error)" "$log" | cut -c1-180 | tail -12
done
for name in bench8b bench1b trace; do
  [ -f "$OUT/$name.log" ] || continue
  echo "-- $OUT/$name.log"
  grep "exposed communication" "$OUT/$name.log" | cut -c1-300
  if grep -q "rounds of" "$OUT/$name.log"; then
    sed -n '/rounds of/,$p' "$OUT/$name.log" | cut -c1-220
  else # cut short: the wrappers that were finished
    grep -A1 "^wrapper " "$OUT/$name.log" | cut -c1-220
    tail -5 "$OUT/$name.log" | cut -c1-300
  fi
done
cat "$OUT/status.txt"
