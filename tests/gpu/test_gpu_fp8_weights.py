"""Quantized weights: bytes and scales that this package's kernels make of main weights are those of
Transformer Engine's, bit for bit; on one GPU, or on two.

    python -m pytest -q -rA tests/gpu/test_gpu_fp8_weights.py
"""

from __future__ import annotations

import torch

from tests.gpu.gpu_ranks import Check, Outcomes, expecting
from tests.quantized.te_checks import (
    host_is_the_device,
    nothing_waits,
    ranks_are_te,
    shards_are_the_whole,
)
from tests.quantized.te_modules import (
    MODULES,
    modules_compute_from_buffers,
    quantizers_are_te,
)
from tests.quantized.te_weights import NASTY, RECIPES

GPUS = 1

CELLS = [(recipe, nasty) for recipe in RECIPES for nasty in NASTY]
CHECKS = {
    **{
        f"{label}, {recipe}, {nasty or 'usual'}": Check(check, (recipe, nasty, count))
        for label, check, count in (
            ("shards are the whole", shards_are_the_whole, 10),
            ("the host is the device", host_is_the_device, 4),
        )
        for recipe, nasty in CELLS
    },
    **{
        f"two ranks are TE's, {recipe}, {kind}": Check(ranks_are_te, (recipe, kind))
        for recipe in RECIPES
        for kind in ("cut", "first rank only", "wide")
    },
    **{f"quantizers are TE's, {recipe}": Check(quantizers_are_te, (recipe,)) for recipe in RECIPES},
    **{
        f"modules compute from buffers, {recipe}, {name}": Check(
            modules_compute_from_buffers, (recipe, name)
        )
        for recipe in ("current", "delayed", "blockwise")
        for name in MODULES
    },
    "nothing waits": Check(nothing_waits),
}
OUTCOMES = Outcomes(
    CHECKS, timeout_s=240.0, backend="nccl" if torch.cuda.device_count() > 1 else "gloo"
)

test_quantized_weights_are_those_of_te = expecting(OUTCOMES)
