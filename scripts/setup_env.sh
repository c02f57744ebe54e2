#!/usr/bin/env bash
# Makes the Python environment in .venv (or $VENV) unless it is there and up to date, and prints
# the path of its interpreter as the last line.
#
# Usage: scripts/setup_env.sh EXTRA...      extras of pyproject.toml: train, test
#
# PYTHON picks the interpreter (3.10 or newer). An environment that is already active and has
# everything can be used instead: set VENV to its folder. torch is the first release of
# scripts/requirements/{older,newer}.txt that pip may have; TORCH_VERSION names another one.
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

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check "$@"; }

# Installs this requirement of torch with the package. Its messages are in $messages.
install() {
  # Compiling all of it to bytecode takes longer than the rest; what is imported is compiled then.
  pip_install --quiet --no-compile "$1" -e ".[$extras]" > "$messages" 2>&1
}

# True if pip refused a release of torch, so that another one may do: it conflicts with a constraint
# or another requirement, or no index has it.
refused() { grep -qE 'Cannot install .*torch==|No matching distribution found for torch==' "$messages"; }

# What pip says against this requirement, on one line.
reason() {
  local text
  text=$(pip_install --dry-run --no-deps --ignore-installed "$1" 2>&1 | grep -E '\(constraint\)|No matching' || true)
  [ -n "$text" ] || text=$(grep -E 'ERROR' "$messages")
  echo "$text" | sed 's/^ *//' | paste -sd ' '
}

# Installs the first of these requirements that pip may have, and says which. If it may have none of
# them, says why, and what to do.
install_first() {
  local torch excluded=
  for torch in "$@"; do
    if install "$torch"; then
      cat "$messages" >&2
      echo "scripts/setup_env.sh: $torch in $venv$excluded" >&2
      return
    fi
    if ! refused; then
      cat "$messages" >&2
      return 1
    fi
    excluded+="; not $torch: $(reason "$torch")"
  done
  cat >&2 <<EOF
scripts/setup_env.sh: pip may have none of these releases$excluded
Constraints are set by: $("$venv/bin/python" -m pip config list | grep -i constraint || echo "no configuration of pip")
Allow one of these releases there, or name one that is allowed with TORCH_VERSION. The package supports $(grep -o 'torch>=[^"]*' pyproject.toml).
EOF
  return 1
}

stamp="$venv/.installed-$extras"
wanted=$(cat pyproject.toml scripts/setup_env.sh scripts/requirements/*.txt | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  # torch is pinned to the releases that the tests run on: pip would take the newest, tested or not.
  # megatron-core is not: pip takes the newest that this Python can have, of the range in pyproject.toml.
  kind=$("$venv/bin/python" -c 'import sys; print("newer" if sys.version_info >= (3, 12) else "older")')
  mapfile -t tested < <(grep '^torch==' "scripts/requirements/$kind.txt")
  [ -z "${TORCH_VERSION:-}" ] || tested=("torch==$TORCH_VERSION")
  messages=$(mktemp)
  trap 'rm -f "$messages"' EXIT
  install_first "${tested[@]}"
  echo "$wanted" > "$stamp"
fi
echo "$venv/bin/python"
