"""Formats of a model's linear weights by Megatron's FP8 and FP4 options."""

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
"""Format of weights that are quantized for the GEMM. Weights are not kept or gathered in it. It has
4-bit floats, two in a byte, and in every row one scale per 16 elements, shared by 16 x 16
elements."""

RECIPES: Mapping[str, Mapping[str, WeightFormat]] = {
    "fp8": {
        "delayed": PER_TENSOR, "tensorwise": PER_TENSOR, "blockwise": BLOCK128, "mxfp8": MXFP8,
    },
    "fp4": {"nvfp4": NVFP4},
}  # fmt: skip
"""Precision -> recipe -> weight format of the GEMM."""

DEFAULTS = {"fp8": "delayed", "fp4": "nvfp4"}
KEPT_IN_BF16 = "first_last_layers_bf16"
"""The option that excludes some layers from quantization; not supported here."""

STRINGS = {
    "fp8_format": "hybrid or e4m3: FP8 GEMMs; default: none",
    "fp8_recipe": f"one of {', '.join(RECIPES['fp8'])}; default: {DEFAULTS['fp8']}",
    "fp4_format": "e2m1: FP4 GEMMs; default: none",
    "fp4_recipe": f"one of {', '.join(RECIPES['fp4'])}; default: {DEFAULTS['fp4']}",
    "recompute_granularity": "full: layers recompute activations in backward; default: none do",
}
SWITCHES = {
    "fp8_param_gather": "linear weights kept and gathered in FP8",
}


@dataclass(frozen=True)
class Quantization:
    """Quantization of linear weights.

    weights: the format in which linear weights are kept and gathered (None: the compute dtype).
    products: the format in the GEMM if weights are kept in the compute dtype (None: not quantized).
    recomputes: True if layers are recomputed in backward."""

    weights: WeightFormat | None = None
    products: WeightFormat | None = None
    recomputes: bool = False

    @property
    def name(self) -> str:
        """Description for a title."""
        if self.weights is not None:
            return f"linear weights as {self.weights.name}"
        return "" if self.products is None else f"products of {self.products.name} weights"


PLAIN = Quantization()


def quantization(options: Mapping[str, Any], dtype: str) -> Quantization:
    """The quantization by Megatron's options. dtype: that of compute weights. Raises ValueError
    with option, value and remedy."""
    refused = [name for name in ("fp4_param_gather", "fp4_param") if options.get(name)]
    if refused:
        raise ValueError(
            f"{flag(refused[0])}: weights cannot be kept or gathered in NVFP4. Leave it out"
        )
    found: list[tuple[bool, WeightFormat]] = []
    for precision, recipes in RECIPES.items():
        name = options.get(f"{precision}_recipe") or DEFAULTS[precision]
        gather = f"{precision}_param_gather"
        gathers = bool(options.get(gather) or options.get(f"{precision}_param"))
        if not (gathers or options.get(f"{precision}_format") or options.get(precision)):
            continue
        if name not in recipes:
            raise ValueError(
                f"{flag(f'{precision}_recipe')} {name!r} is unknown. Use one of {list(recipes)}"
            )
        if gathers and dtype != "bf16":
            raise ValueError(
                f"{flag(gather)} with --params-dtype {dtype} requires bf16 for weights that are "
                "not quantized. Use --params-dtype bf16, or leave it out"
            )
        found.append((gathers, recipes[name]))
    if len(found) > 1:
        raise ValueError("FP8 and FP4 are both set. Leave the options of one of them out")
    if found and options.get(KEPT_IN_BF16):
        raise ValueError(
            f"{flag(KEPT_IN_BF16)}: unsupported, because layers that stay bf16 are not modeled. "
            "Leave it out"
        )
    gathers, form = found[0] if found else (False, None)
    recomputes = options.get("recompute_granularity") == "full"
    return Quantization(form if gathers else None, None if gathers else form, recomputes)
