#!/usr/bin/env bash
# Lint, types and tests, in environments that this script makes. Needs nothing but Python.
#
# Usage: bash scripts/test.sh [--full] [pytest arguments]
#   --full  every matrix and the 8-process cases; without it at most 20 minutes on 2 cores
#
# Which megatron-core pip finds depends on the Python: 0.16.1 is the last for 3.10 and 3.11. So the
# tests run twice where both kinds of Python are installed: all of them with $PYTHON (python3), and
# what differs between releases (tests/lib/again.py), and what the first run skipped, with one of the
# other kind; with --full all that concerns core, with both. With pytest arguments (other than
# --full) they run once, in one process; else in two at a time. TWICE=0 runs them once, too.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # or each of the many processes recompiles torch and Megatron
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
# New buffers hold NaN. This changes no result (tests/core/engine/test_engine_scenarios.py), and shows reads
# of memory that was never written. 0 switches it off.
export MEGATRON_FSDP_ADAPTER_POISON=${MEGATRON_FSDP_ADAPTER_POISON:-1}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}

kind_of() { "$1" -c 'import sys; print("newer" if sys.version_info >= (3, 12) else "older")' 2>/dev/null; }

# A Python of the other kind than $1, the newest of those that are found; nothing if there is none.
other_python() {
  local own found pyenv
  own=$(kind_of "$1")
  pyenv=$(pyenv root 2>/dev/null || true)
  for found in python3.{13,12,11,10} "$pyenv"/versions/3.{13,12,11,10}*/bin/python; do
    found=$(command -v "$found") || continue
    case "$(kind_of "$found")" in "" | "$own") ;; *) echo "$found"; return ;; esac
  done
}

main_python=${PYTHON:-python3}
python=$(bash scripts/setup_env.sh train test | tail -n 1)
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
"$python" -m mypy

other=
rest=("$@")
[ "${1:-}" = --full ] && rest=("${@:2}")
[ ${#rest[@]} -gt 0 ] || set -- "$@" -n 2
if [ "${TWICE:-1}" = 1 ] && [ ${#rest[@]} = 0 ]; then
  other=$(other_python "$main_python")
  [ -n "$other" ] || echo "No Python of the other kind (3.12 and newer, or 3.10 and 3.11): tests run with one megatron-core."
fi
if [ -n "$other" ]; then
  other=$(PYTHON=$other VENV=.venv-other bash scripts/setup_env.sh train test | tail -n 1)
  export MEGATRON_FSDP_ADAPTER_OTHER_PYTHON=$other # reads and writes checkpoints of the other release
fi
release() { "$1" -c 'import sys, torch, megatron.core as m; print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, megatron-core {m.__version__}")'; }

echo "== $(release "$python")"
if [ -z "$other" ]; then
  exec "$python" -m pytest "$@"
fi
skips=$(mktemp)
trap 'rm -f "$skips"' EXIT
"$python" -m pytest "$@" --skips="$skips"
export MEGATRON_FSDP_ADAPTER_OTHER_PYTHON=$python
echo "== $(release "$other")"
if [ "${1:-}" = --full ]; then
  "$other" -m pytest -n 2 --full tests/{build,checkpoint,core,graphs,integration,launch,megatron,optim,plain,plan,rollout,state}
else
  "$other" -m pytest -n 2 --again --skips="$skips"
fi
