#!/usr/bin/env bash
# All tests for GPUs (tests/gpu), on one GPU that ranks share, or on as many as there are. Several files run at once; a later call with the same
# results goes on with what was not reached. The status is 0 if all was reached and nothing failed.
#
#   bash scripts/gpu_check.sh [--results FILE] [--log DIR] [--time-limit S] [--only WORD] [--jobs N]
#                             [--again] [--list]              # more: python -m tests.gpu --help
#
# Ranks that share a GPU need NCCL 2.31 or newer, which torch may not bring: NCCL names its
# libnccl.so.2 (bash scripts/get_nccl.sh makes runs/nccl/libnccl.so.2, which is the default).
# Environment: PYTHON (python3), NCCL, MEGATRON_LM_PATH (for the tests of pretrain_gpt.py).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
NCCL=${NCCL:-runs/nccl/libnccl.so.2}
unset PYTHONDONTWRITEBYTECODE # or each of the many processes recompiles torch and Megatron
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} MEGATRON_FSDP_ADAPTER_POISON=1
# NVLink multicast stays off, whatever starts this script.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
export NVSHMEM_DISABLE_NVLS=${NVSHMEM_DISABLE_NVLS:-1}
# Files that run beside each other take turns on the device and on the host.
export GPU_TEST_PATIENCE=${GPU_TEST_PATIENCE:-6}

gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)
if [ "$gpus" = 1 ]; then
  if [ ! -f "$NCCL" ]; then
    echo "gpu_check.sh: NCCL=$NCCL: there is no such file, and ranks that share a GPU need NCCL 2.31. Run bash scripts/get_nccl.sh." >&2
    exit 2
  fi
  NCCL=$(realpath "$NCCL")
  export LD_PRELOAD="$NCCL${LD_PRELOAD:+:$LD_PRELOAD}" NCCL_MULTI_RANK_GPU_ENABLE=1
  # All 32 layers of the model that test_gpu_estimate.py measures are more than one GPU holds.
  export ESTIMATE_LAYERS=${ESTIMATE_LAYERS:-12}
fi
exec "$PYTHON" -m tests.gpu "$@"
