#!/usr/bin/env bash
# Makes a folder from which Python imports the megatron-core of a checkout of Megatron-LM, in place
# of an installed one, and nothing else of the checkout: that has a package `tests`, too. The folder
# has links to the checkout's files, and the compiled helpers of the installed megatron-core.
#
# Usage: scripts/checkout_core.sh CHECKOUT FOLDER PYTHON
set -euo pipefail
checkout=$1 folder=$2 python=$3

if [ ! -f "$checkout/megatron/core/__init__.py" ]; then
  echo "--core $checkout: has no megatron/core. Name a checkout of Megatron-LM" >&2
  exit 2
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
  echo "--core $checkout: needs Python 3.12 or newer, but this is $version. Install one, or set PYTHON to it" >&2
  exit 2
fi
mkdir -p "$folder"
cp -rs "$(realpath "$checkout")/megatron" "$folder"
# Importing megatron.core, to ask it, would take seconds.
"$python" -c 'import megatron; print(*megatron.__path__, sep="\n")' 2>/dev/null | while read -r installed; do
  for helpers in "$installed"/core/datasets/helpers_cpp*.so; do
    [ ! -f "$helpers" ] || cp -n "$helpers" "$folder/megatron/core/datasets/"
  done
done
