"""What reduced precision a device can compute in, by Transformer Engine's word.

Asked before anything runs: TE asks by itself where a layer is called, but not where weights are
made. Its MXFP8 cast is an empty kernel on GPUs without that format, so that the weights of a model
are whatever was in memory, and nothing says so.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
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
"""What TE is asked about, by the name that megatron-core has for a recipe."""

PACKAGE = "transformer_engine.pytorch"


DEFAULTS: Mapping[str, str] = {"fp8": FP8_RECIPES[0], "fp4": FP4_RECIPES[0]}
"""Options that ask for reduced precision, with core's default for their recipes."""


def recipe_of(config: Any) -> tuple[str, str] | None:
    """The option that asks for reduced precision, and its recipe's name; None without any."""
    for option, default in DEFAULTS.items():
        if is_on(config, option):
            recipe = getattr(config, f"{option}_recipe", None) or default
            return option, str(getattr(recipe, "value", recipe))
    return None


def device_problems(config: Any, device: torch.device) -> list[str]:
    """One line if `device` cannot compute what a model's `config` asks for: it names both, and
    TE's reason. Nothing about recipes that are refused anyway."""
    asked = recipe_of(config)
    if asked is None or asked[1] not in QUESTIONS:
        return []
    option, recipe = asked
    reason = reason_against(recipe, device)
    if reason is None:
        return []
    return [
        f"{option}={getattr(config, option)!r} with {option}_recipe={recipe!r}: "
        f"{device_name(device)} cannot compute it: {reason}; use another recipe, or leave {option} "
        "unset"
    ]


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"device {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def reason_against(recipe: str, device: torch.device) -> str | None:
    """Why `recipe` cannot be computed on `device`; None if it can."""
    if device.type != "cuda":
        return "Transformer Engine computes on GPUs alone"
    try:
        ask = _question(QUESTIONS[recipe])
        with torch.cuda.device(device):
            is_able, reason = ask()
    except (ImportError, AttributeError) as error:
        return f"Transformer Engine cannot be asked ({error})"
    return None if is_able else str(reason)


def _question(name: str) -> Callable[[], tuple[bool, str]]:
    """TE's function that tells whether the current device computes what is called `name`, and why
    not. ImportError without TE, AttributeError where it has no such function."""
    package = importlib.import_module(PACKAGE)
    public = getattr(package, f"is_{name}_available", None)
    if public is not None:
        return functools.partial(public, return_reason=True)
    older = importlib.import_module(f"{PACKAGE}.fp8")
    found: Callable[[], tuple[bool, str]] = getattr(older, f"check_{name}_support")
    return found
