"""Reduced precisions that a device supports, according to Transformer Engine.

Checked before anything runs: TE checks when a layer is called, but not when weights are made. On
GPUs without MXFP8 its MXFP8 cast is an empty kernel, which leaves weights uninitialized without an
error.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from .rules import is_on
from .support import FP4_RECIPES, FP8_RECIPES

QUESTIONS: Mapping[str, str] = {
    "delayed": "fp8",
    "tensorwise": "fp8",
    "blockwise": "fp8_block_scaling",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""megatron-core's name of a recipe -> TE's name of the capability."""

PACKAGE = "transformer_engine.pytorch"


DEFAULTS: Mapping[str, str] = {"fp8": FP8_RECIPES[0], "fp4": FP4_RECIPES[0]}
"""Options for reduced precision -> core's default recipe."""


def recipe_of(config: Any) -> tuple[str, str] | None:
    """The option for reduced precision that is set, and its recipe's name; None without any."""
    for option, default in DEFAULTS.items():
        if is_on(config, option):
            recipe = getattr(config, f"{option}_recipe", None) or default
            return option, str(getattr(recipe, "value", recipe))
    return None


def device_problems(config: Any, device: torch.device) -> list[str]:
    """A problem, with TE's reason, if `device` does not support the precision of a model's
    `config`. Rules in `support.py` reject unknown recipes."""
    asked = recipe_of(config)
    if asked is None or asked[1] not in QUESTIONS:
        return []
    option, recipe = asked
    reason = reason_against(recipe, device)
    if reason is None:
        return []
    return [
        f"{option}={getattr(config, option)!r} with {option}_recipe={recipe!r}: "
        f"{device_name(device)} does not support it: {reason}. Use another recipe, or leave "
        f"{option} unset"
    ]


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"device {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def reason_against(recipe: str, device: torch.device) -> str | None:
    """The reason why `device` does not support `recipe`; None if it does."""
    if device.type != "cuda":
        return "Transformer Engine requires a GPU"
    try:
        package = importlib.import_module(PACKAGE)
        ask = getattr(package, f"is_{QUESTIONS[recipe]}_available")
        with torch.cuda.device(device):
            is_able, reason = ask(return_reason=True)
    except (ImportError, AttributeError) as error:
        return f"Transformer Engine has no capability check ({error})"
    return None if is_able else str(reason)
