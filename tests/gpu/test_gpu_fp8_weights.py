"""Quantized weights: bytes and scales that this package's kernels make of main weights are those of
Transformer Engine's, bit for bit, and of the emulated library's on the host; on one GPU, or on two.

    python -m pytest -q -rA tests/gpu/test_gpu_fp8_weights.py
"""

from __future__ import annotations

import torch

from tests.lib.gpu.gpu_ranks import Check, Outcomes, expecting
from tests.lib.quantized.emulated import RECIPES, TE_RECIPES
from tests.lib.quantized.te_checks import nothing_waits, shards_are_the_whole
from tests.lib.quantized.te_weights import NASTY

CHECKS = ("quantized/e4m3.py", "quantized/triton_e4m3.py")

GPUS = 1

DEVICE_CHECKS = {
    **{
        f"shards are the whole, {recipe}, {nasty or 'usual'}": Check(
            shards_are_the_whole, (recipe, nasty, 10)
        )
        for recipe in (*RECIPES, *TE_RECIPES)
        for nasty in NASTY
    },
    **{
        f"wide, {recipe}": Check(shards_are_the_whole, (recipe, "", 2, 8192))
        for recipe in TE_RECIPES
    },
    **{f"nothing waits, {recipe}": Check(nothing_waits, (recipe,)) for recipe in RECIPES},
}
OUTCOMES = Outcomes(
    DEVICE_CHECKS, timeout_s=240.0, backend="nccl" if torch.cuda.device_count() > 1 else "gloo"
)

test_quantized_weights_are_those_of_te = expecting(OUTCOMES)
