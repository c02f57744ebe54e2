"""Checks options of Transformer Engine's recipes that weights cannot be made with; an error names
one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8, WeightFormat

DTYPE = "kFloat8E4M3"
"""Name of the elements' dtype in TE."""

OPTIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    BLOCK128.name: {"w_block_scaling_dim": (2,)},
    # With other values backward would read rows, which was not run.
    MXFP8.name: {"enable_2d_quantization": (False,), "backward_override": (None,)},
}
"""Format -> values that options of a recipe may have, where it has them."""

SETTINGS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    BLOCK128.name: {"block_scaling_dim": (2, "w_block_scaling_dim=2")},
    MXFP8.name: {"with_2d_quantization": (False, "enable_2d_quantization=False")},
}
"""Format -> values that settings of a quantizer may have, where it has them, and the recipe that
sets them.
"""


def check_recipe(recipe: Any, format: WeightFormat, where: str) -> None:
    """NotImplementedError for an option that is not supported."""
    for option, values in OPTIONS.get(format.name, {}).items():
        value = getattr(recipe, option, values[0])
        if value not in values:
            raise NotImplementedError(
                f"{where}: {option}={value!r} of recipe {type(recipe).__name__} is not supported "
                f"for weights that are quantized to {format.name}. Use {option}={values[0]!r}"
            )


def check_quantizer(param: nn.Parameter, format: WeightFormat, name: str) -> None:
    """NotImplementedError for a weight whose bytes are not such as casts of main weights make."""
    quantizer: Any = param._quantizer  # type: ignore[attr-defined]
    for setting, (wanted, remedy) in SETTINGS.get(format.name, {}).items():
        value = getattr(quantizer, setting, wanted)
        if value != wanted:
            raise NotImplementedError(
                f"parameter {name} was quantized with {setting}={value!r}, which is not supported "
                f"for weights that are quantized to {format.name}. Use {remedy}"
            )
    if quantizer.dtype.name != DTYPE:
        raise NotImplementedError(
            f"parameter {name} is quantized to {quantizer.dtype.name}, but weights that are "
            f"quantized to {format.name} must be {DTYPE}"
        )
    if getattr(param, "_with_gemm_swizzled_scales", False):
        raise NotImplementedError(
            f"parameter {name} has scales in the order of GEMMs, which have no rows that "
            "could be sharded. Make it by a quantizer with optimize_for_gemm=False"
        )
