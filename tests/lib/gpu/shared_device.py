"""Several ranks on one GPU, for tests of what ranks compute on machines that have no second one.

NCCL from 2.31 on allows that where `NCCL_MULTI_RANK_GPU_ENABLE=1` says so; a newer one than torch
brings is preloaded (docs/contributing/matrix.md). The ranks take turns on the device, so that no
time means anything.
"""

from __future__ import annotations

import os

import torch

WANTED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
PATIENCE = float(os.environ.get("GPU_TEST_PATIENCE", "3" if WANTED else "1"))
"""By what limits of time are multiplied. More where several files run at once."""


def devices() -> int:
    """How many GPUs tests may count on."""
    found = torch.cuda.device_count()
    return max(found, 8) if found and WANTED else found
