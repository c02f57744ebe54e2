#!/usr/bin/env bash
# The unit test that Megatron-LM has for its own FSDP wrapper, unmodified, with this package's class
# in the place of that one, and for comparison with that one itself. Prints a table of both.
#
#   MEGATRON_LM_PATH=checkout OUT=folder bash scripts/peer_tests.sh
#
# Of the checkout (core_v0.16.1 or core_v0.19.0) it needs the scripts in its root, megatron/{training,
# rl,legacy}, and of tests/: __init__.py, unit_tests/__init__.py, unit_tests/test_utilities.py and
# unit_tests/distributed/{megatron_fsdp,mfsdp_v1}: 2 MB. megatron.core comes from there or is
# installed. Needs 2 GPUs (RANKS), pytest, the megatron-core of the checkout, Transformer Engine 2.7
# or newer (what the tests switch on), and what Megatron-LM's training modules import: six, regex,
# pydantic.
#
# WHO: "ours bundled" (default), or one of them. ONLY: expressions for pytest -k, parted by commas
# (default: each test function of the file); each is a start of its own. LIMIT: seconds for each.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${MEGATRON_LM_PATH:?names a checkout of Megatron-LM}"
OUT=${OUT:-runs/gpu}
PYTHON=${PYTHON:-python3}
RANKS=${RANKS:-2}
LIMIT=${LIMIT:-400}
WHO=${WHO:-ours bundled}
PLUGIN=${PLUGIN:-peer_tests}
root=$PWD
checkout=$(cd "$MEGATRON_LM_PATH" && pwd) || exit 2
out=$(mkdir -p "$OUT/peer_tests" && cd "$OUT/peer_tests" && pwd)
file=test_mcore_fully_sharded_data_parallel.py
test=$(cd "$checkout" && ls tests/unit_tests/distributed/{mfsdp_v1,megatron_fsdp}/$file 2>/dev/null | head -1)
[ -n "$test" ] || { echo "no $file in $checkout" >&2; exit 2; }
folder=$(dirname "$test")
ONLY=${ONLY:-$(sed -n 's/^ *def \(test_[a-z0-9_]*\)(.*/\1/p' "$checkout/$test" | paste -sd,)}

# The checkout first: it has a folder `tests` of its own, as this repository has.
export PYTHONPATH="$checkout:$root:$root/tests/integration${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export CUDA_DEVICE_MAX_CONNECTIONS=8 NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

# shellcheck source=lib/ranks.sh
. scripts/lib/ranks.sh
export RANKS

# The conftest of the tests is left out: it downloads data sets. So is its pytest configuration,
# which stops at the first failure.
IFS=, read -ra chosen <<< "$ONLY"
for who in $WHO; do
  export PEER_TESTS_OUT="$out/$who" PEER_TESTS_WHO="$who"
  mkdir -p "$PEER_TESTS_OUT"
  rm -f "$PEER_TESTS_OUT"/*.jsonl
  for function in "${chosen[@]}"; do
    export PEER_TESTS_FUNCTION="${function// /_}"
    log="$PEER_TESTS_OUT/$PEER_TESTS_FUNCTION.log"
    (cd "$checkout" && timeout --kill-after=10 "$LIMIT" bash -c 'ranks "$@"' peer_tests \
      "$PYTHON" -m pytest -c /dev/null --rootdir "$checkout" --confcutdir "$checkout/$folder" \
      --import-mode=importlib -p no:cacheprovider -p "$PLUGIN" -q -s -k "$function" "$test") \
      > "$log" 2>&1 || echo "$who: $function ended with status $?" | tee -a "$log"
  done
done
"$PYTHON" "$root/tests/integration/peer_tests.py" "$out" --world-size "$RANKS" | tee "$out/table.txt"
exit "${PIPESTATUS[0]}"
