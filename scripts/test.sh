#!/usr/bin/env bash
# Lint, types and tests, in an environment that this script makes. Needs nothing but Python.
#
# Usage: bash scripts/test.sh [--full] [pytest arguments]
#   --full  every matrix and the 8-process cases; without it at most 15 minutes on 2 cores
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # or each of the many processes compiles torch and Megatron anew
python=$(bash scripts/setup_env.sh train test | tail -n 1)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
# Buffers hold NaN until somebody writes them: it changes no result (tests/engine/test_engine_poison.py),
# and shows who reads what nobody wrote. 0 leaves it out.
export MEGATRON_FSDP_ADAPTER_POISON=${MEGATRON_FSDP_ADAPTER_POISON:-1}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}

"$python" -m ruff check .
"$python" -m mypy
"$python" -m pytest "$@"
