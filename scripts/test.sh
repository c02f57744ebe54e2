#!/usr/bin/env bash
# Lint, types and tests, in environments that this script makes. Needs nothing but Python.
#
# Usage: bash scripts/test.sh [--full] [--core CHECKOUT] [pytest arguments]
#   --full  every matrix and the 8-process cases; without it at most 20 minutes on 2 cores
#   --core  a checkout of Megatron-LM: its megatron-core takes the place of the installed one in the
#           environment with Python 3.12 or newer
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

full=() core=
while true; do
  case "${1:-}" in
    --full) full=(--full); shift ;;
    --core) core=${2:?--core needs the path of a checkout of Megatron-LM}; shift 2 ;;
    *) break ;;
  esac
done

[ $# -gt 0 ] && is_whole=0 || is_whole=1
[ $is_whole = 0 ] || set -- -n 2

main_python=${PYTHON:-python3}
python=$(bash scripts/setup_env.sh train test | tail -n 1)
other=
if [ "${TWICE:-1}" = 1 ] && [ $is_whole = 1 ]; then
  other=$(other_python "$main_python")
  [ -n "$other" ] || echo "No Python of the other kind (3.12 and newer, or 3.10 and 3.11): tests run with one megatron-core."
fi
if [ -n "$other" ]; then
  other=$(PYTHON=$other VENV=.venv-other bash scripts/setup_env.sh train test | tail -n 1)
fi

files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT
if [ -n "$core" ]; then
  core_python=$python
  [ "$(kind_of "${other:-$python}")" = older ] || core_python=${other:-$python}
  bash scripts/checkout_core.sh "$core" "$files/core" "$core_python"
fi
# The folder from which the interpreter $1 is to import megatron-core; nothing if it is installed.
core_of() { [ -z "$core" ] || [ "$(kind_of "$1")" = older ] || echo "$files/core"; }

# Runs the interpreter $1 with its megatron-core, and with that of $2, if any, for files of the other
# release.
run() {
  local mine theirs
  mine=$(core_of "$1") theirs=
  [ -z "$2" ] || theirs=$(core_of "$2")
  PYTHONPATH="$PYTHONPATH${mine:+:$mine}" ${mine:+env MEGATRON_LM_PATH="$core"} \
    env ${2:+MEGATRON_FSDP_ADAPTER_OTHER_PYTHON="$2"} MEGATRON_FSDP_ADAPTER_OTHER_PATH="$theirs" \
    "$1" "${@:3}"
}
release() {
  run "$1" "" -W ignore -c 'import sys, torch, megatron.core as m; print(f"== Python {sys.version.split()[0]}, torch {torch.__version__}, megatron-core {m.__version__}")'
}

"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
"$python" -m mypy

release "$python"
if [ -z "$other" ]; then
  run "$python" "" -m pytest "${full[@]}" "$@"
  exit
fi
run "$python" "$other" -m pytest "${full[@]}" "$@" --skips="$files/skips"
release "$other"
if [ ${#full[@]} -gt 0 ]; then
  run "$other" "$python" -m pytest -n 2 --full tests/{build,checkpoint,core,graphs,integration,launch,megatron,optim,plain,plan,rollout,state}
else
  run "$other" "$python" -m pytest -n 2 --again --skips="$files/skips"
fi
