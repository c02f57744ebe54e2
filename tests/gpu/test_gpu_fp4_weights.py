"""NVFP4 and MXFP8 weights on one GPU, of any architecture: this package's kernels against float64
and against torch on the host and on the device, and those of Transformer Engine's that run there.

    python -m pytest -q -s tests/gpu/test_gpu_fp4_weights.py

The last test prints a table of all of them. Training needs a GPU that has matrix products of these
formats.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from tests.gpu.gpu_ranks import Check, Outcomes
from tests.quantised.fp4_table import CHECKS as ALL_CHECKS
from tests.quantised.fp4_table import table

GPUS = 1
CHECKS = {name: Check(function, arguments) for name, (function, arguments) in ALL_CHECKS.items()}
OUTCOMES = Outcomes(CHECKS, timeout_s=400.0, world=1, backend="gloo")


@pytest.mark.parametrize("name", CHECKS)
def test_weights_are_what_their_formats_say(name: str) -> None:
    OUTCOMES.expect(name)


def test_table() -> None:
    found = [f"{name} {version(name)}" for name in ("torch", "triton", "transformer_engine")]
    print("\n" + ", ".join([torch.cuda.get_device_name(), *found]) + "\n")
    print(table(OUTCOMES.values()))
