"""What Megatron's options of FP8 and FP4 make of a model's linear weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp_adapter.core.layout.format import (
    BLOCK128,
    MXFP8,
    PER_TENSOR,
    Plane,
    WeightFormat,
)

from .spec import flag

NVFP4 = WeightFormat(
    "nvfp4",
    (Plane("rowwise", torch.uint8, (1, 2)), Plane("rowwise_scales", torch.uint8, (1, 16))),
    rows=16,
    align=512,
)
"""Of weights that are quantized for a matrix product; weights are not kept or gathered so: 4-bit
floats, two in a byte, and one scale for each 16 x 16 elements in every row of them."""

RECIPES: Mapping[str, Mapping[str, WeightFormat]] = {
    "fp8": {
        "delayed": PER_TENSOR, "tensorwise": PER_TENSOR, "blockwise": BLOCK128, "mxfp8": MXFP8,
    },
    "fp4": {"nvfp4": NVFP4},
}  # fmt: skip
"""The format of weights that each recipe multiplies, by the precision that has it."""

DEFAULTS = {"fp8": "delayed", "fp4": "nvfp4"}
KEPT_IN_BF16 = ("first_last_layers_bf16",)
"""Options by which some layers are not quantized, which is not told apart here."""

STRINGS = {
    "fp8_format": "hybrid or e4m3: FP8 matrix products",
    "fp8_recipe": f"one of {', '.join(RECIPES['fp8'])}; default {DEFAULTS['fp8']}",
    "fp4_format": "e2m1: FP4 matrix products",
    "fp4_recipe": f"one of {', '.join(RECIPES['fp4'])}",
    "recompute_granularity": "full: activations of layers are computed again in backward",
}
SWITCHES = {
    "fp8_param_gather": "linear weights kept and gathered in FP8",
}


@dataclass(frozen=True)
class Quantization:
    """weights: the format that linear weights are kept and gathered in, None for the compute
    dtype. products: that of matrix products whose weights are kept in the compute dtype, None if
    those are not quantized. recomputes: whether layers run again in backward."""

    weights: WeightFormat | None = None
    products: WeightFormat | None = None
    recomputes: bool = False

    @property
    def name(self) -> str:
        """For a title."""
        if self.weights is not None:
            return f"linear weights as {self.weights.name}"
        return "" if self.products is None else f"products of {self.products.name} weights"


PLAIN = Quantization()


def quantization(options: Mapping[str, Any], dtype: str) -> Quantization:
    """Of Megatron's options; `dtype`: of the compute weights. ValueError names option, value and
    remedy."""
    weights: list[WeightFormat] = []
    products: list[WeightFormat] = []
    refused = [name for name in ("fp4_param_gather", "fp4_param") if options.get(name)]
    if refused:
        raise ValueError(
            f"{flag(refused[0])}: weights are not kept or gathered in NVFP4; leave it out"
        )
    for precision, recipes in RECIPES.items():
        name = options.get(f"{precision}_recipe") or DEFAULTS[precision]
        gather = f"{precision}_param_gather"
        gathers = options.get(gather) or options.get(f"{precision}_param")
        computes = options.get(f"{precision}_format") or options.get(precision)
        if not gathers and not computes:
            continue
        if name not in recipes:
            raise ValueError(
                f"{flag(f'{precision}_recipe')} {name!r} is unknown: use one of {list(recipes)}"
            )
        if gathers and dtype != "bf16":
            raise ValueError(
                f"{flag(gather)} with --params-dtype {dtype}: what is not quantized is bf16; use "
                "--params-dtype bf16, or leave it out"
            )
        (weights if gathers else products).append(recipes[name])
    if len(weights) + len(products) > 1:
        raise ValueError("FP8 and FP4 are both asked for: leave the options of one of them out")
    for option in KEPT_IN_BF16 if weights or products else ():
        if options.get(option):
            raise ValueError(
                f"{flag(option)}: the layers that stay bf16 are not told apart here; leave it out"
            )
    return Quantization(
        weights[0] if weights else None,
        products[0] if products else None,
        options.get("recompute_granularity") == "full",
    )
