"""Cells of the matrix beside stock DDP (docs/contributing/matrix.md), by default all that shard
over two GPUs.

MATRIX: words that the names of the chosen cells have; MATRIX_ARRAY: gpu_dp, or gpu for the
model-parallel axes too; MATRIX_WIDTH: small, or real.
"""

from __future__ import annotations

import os

from tests.lib.gpu.gpu_ranks import DETERMINISTIC, Check, Outcomes, expecting
from tests.lib.matrix.cells import cells_with
from tests.lib.matrix.table import cell_named
from tests.lib.matrix.training import checked_cell

CHECKS = ("core/engine/engine.py", "megatron/wrapper/adapter.py", "optim/step.py")

WIDTH = os.environ.get("MATRIX_WIDTH", "small")
SLOWEST_S = 120.0
"""Of one cell and its reference."""
ENVIRONMENT = {
    **DETERMINISTIC,
    # A kernel that is loaded when it is first used waits for the device, and so for a receive that
    # another stream has begun: interleaved pipelines hang, stock DDP's too.
    "CUDA_MODULE_LOADING": "EAGER",
    # Products in TF32 round what they read: a weight's last bit becomes 1e-4 of a gradient.
    "NVIDIA_TF32_OVERRIDE": "0",
}


def cell(rank: int, world: int, name: str, width: str) -> str:
    return checked_cell(cell_named(name), width)


DEVICE_CHECKS = {
    name: Check(cell, (name, WIDTH))
    for name in cells_with(
        os.environ.get("MATRIX", "").split(), os.environ.get("MATRIX_ARRAY", "gpu_dp")
    )
}
OUTCOMES = Outcomes(
    DEVICE_CHECKS, timeout_s=SLOWEST_S * len(DEVICE_CHECKS), environment=ENVIRONMENT
)

test_trains_like_stock_ddp = expecting(OUTCOMES)
