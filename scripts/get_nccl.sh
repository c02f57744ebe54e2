#!/usr/bin/env bash
# An NCCL that lets ranks share a GPU (2.31 or newer): $OUT/libnccl.so.2.
#
#   bash scripts/get_nccl.sh
#   NCCL=nvidia-nccl-cu13==2.32.3 OUT=runs/nccl bash scripts/get_nccl.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
NCCL=${NCCL:-nvidia-nccl-cu13>=2.31}
OUT=${OUT:-runs/nccl}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# For Linux on x86-64, on any host.
"$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --platform manylinux_2_27_x86_64 \
  --platform manylinux_2_18_x86_64 --platform manylinux2014_x86_64 --dest "$scratch" "$NCCL"
"$PYTHON" -m zipfile --extract "$scratch"/nvidia_nccl*.whl "$scratch/wheel"
mkdir -p "$OUT"
cp "$scratch/wheel/nvidia/nccl/lib/libnccl.so.2" "$OUT/"
basename "$scratch"/nvidia_nccl*.whl
ls -l "$OUT" | tail -n +2
