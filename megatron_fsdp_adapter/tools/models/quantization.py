"""Formats of a model's linear weights by Megatron's FP8 options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fsdp_adapter.core.layout.format import (
    BLOCK128,
    MXFP8,
    PER_TENSOR,
    WeightFormat,
)

from .spec import Options, flag

RECIPES: Mapping[str, WeightFormat] = {
    "delayed": PER_TENSOR,
    "tensorwise": PER_TENSOR,
    "blockwise": BLOCK128,
    "mxfp8": MXFP8,
}
"""FP8 recipe -> weight format of the GEMM."""

DEFAULT = "delayed"
KEPT_IN_BF16 = "first_last_layers_bf16"
"""The option that excludes some layers from quantization; not supported here."""

FP4 = ("fp4", "fp4_format", "fp4_param", "fp4_param_gather")
"""Options of FP4, which are refused."""

STRINGS = {
    "fp8_format": "hybrid or e4m3: FP8 GEMMs; default: none",
    "fp8_recipe": f"one of {', '.join(RECIPES)}; default: {DEFAULT}",
    "recompute_granularity": "full: layers recompute activations in backward; default: none do",
}
SWITCHES = {
    "fp8_param_gather": "linear weights kept and gathered in FP8",
}


@dataclass(frozen=True)
class Quantization:
    """Quantization of linear weights.

    weights: the format in which linear weights are kept and gathered; None: the compute dtype.
    products: the format into which GEMMs quantize weights of the compute dtype; None if they do
    not, or if `weights` is set. recomputes: True if layers are recomputed in backward."""

    weights: WeightFormat | None = None
    products: WeightFormat | None = None
    recomputes: bool = False

    @property
    def name(self) -> str:
        """Description for a title."""
        if self.weights is not None:
            return f"linear weights as {self.weights.name}"
        if self.products is None:
            return ""
        return f"products of {self.products.name} weights"


PLAIN = Quantization()


def quantization(options: Options, dtype: str) -> Quantization:
    """The quantization that Megatron's options ask for. dtype: name of the compute dtype. Raises
    ValueError for options that are not modeled or contradict each other."""
    for name in FP4:
        if options.get(name):
            raise ValueError(f"{flag(name)}: FP4 is not modeled. Leave it out")
    recomputes = options.get("recompute_granularity") == "full"
    gathers = bool(options.get("fp8_param_gather") or options.get("fp8_param"))
    if not (gathers or options.get("fp8_format") or options.get("fp8")):
        return Quantization(recomputes=recomputes)
    name = options.get("fp8_recipe") or DEFAULT
    if name not in RECIPES:
        raise ValueError(f"--fp8-recipe {name!r} is unknown. Use one of {list(RECIPES)}")
    if gathers and dtype != "bf16":
        raise ValueError(
            f"--fp8-param-gather with --params-dtype {dtype} requires bf16 for weights that are "
            "not quantized. Use --params-dtype bf16, or leave it out"
        )
    if options.get(KEPT_IN_BF16):
        raise ValueError(
            f"{flag(KEPT_IN_BF16)}: unsupported, because layers that stay bf16 are not modeled. "
            "Leave it out"
        )
    if gathers:
        return Quantization(weights=RECIPES[name], recomputes=recomputes)
    return Quantization(products=RECIPES[name], recomputes=recomputes)
