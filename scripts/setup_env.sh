#!/usr/bin/env bash
# Makes the Python environment in .venv (or $VENV) unless it is there and up to date, and prints
# the path of its interpreter as the last line.
#
# Usage: scripts/setup_env.sh EXTRA...      extras of pyproject.toml: train, test
#
# PYTHON picks the interpreter (3.10 or newer). An environment that is already active and has
# everything can be used instead: set VENV to its folder.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}
extras=$(IFS=,; echo "${*:-train}")

"$python" - <<'EOF'
import sys
if sys.version_info < (3, 10):
    sys.exit(f"PYTHON={sys.executable} is Python {sys.version.split()[0]}: 3.10 or newer is needed")
EOF

stamp="$venv/.installed-$extras"
wanted=$(cat pyproject.toml scripts/setup_env.sh | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  # torch is pinned to the releases that the tests run on: pip would take the newest, tested or not.
  # megatron-core is not: pip takes the newest that this Python can have, of the range in pyproject.toml.
  torch=$("$venv/bin/python" -c 'import sys; print("2.15.0" if sys.version_info >= (3, 12) else "2.13.0")')
  # Compiling all of it to bytecode takes longer than the rest; what is imported is compiled then.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    "torch==${TORCH_VERSION:-$torch}" -e ".[$extras]" >&2
  echo "$wanted" > "$stamp"
fi
echo "$venv/bin/python"
