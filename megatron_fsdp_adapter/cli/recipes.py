"""What `doctor` says of a recipe of Megatron-Bridge."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megatron_fsdp_adapter.launch import bridge, installation

MODULE = "megatron.bridge.recipes"

SECTIONS = ("dataset", "optimizer", "train", "mixed_precision", "ddp", "model")
"""Of a recipe's config; of a name that several have, the last one's counts."""


def recipe_named(name: str, overrides: Mapping[str, Any]) -> Any:
    """The finished config of a recipe. overrides: by `section.field`.

    Raises:
        ValueError: Megatron-Bridge is not installed, has no such recipe, or this has no such field.
    """
    try:
        recipes = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--recipe {name}: {error.name} is not installed; doctor asks {MODULE}"
        ) from error
    make = getattr(recipes, name, None)
    if make is None:
        raise ValueError(f"--recipe {name}: {MODULE} has no such function")
    cfg = make()
    for path, value in overrides.items():
        section, _, field = path.partition(".")
        owner = getattr(cfg, section, None)
        if owner is None or not hasattr(owner, field):
            raise ValueError(f"--set {path}: recipe {name} has no such field; write section.field")
        setattr(owner, field, value)
    return cfg


def completed(cfg: Any, **asked: Any) -> tuple[list[Any], list[str]]:
    """What `apply_fsdp_overrides` sets of a recipe, and what it refuses; `asked`: what it is told.
    Nothing stays installed."""
    environment = dict(os.environ)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return bridge.apply_fsdp_overrides(cfg, environment=environment, **asked), []
    except ValueError as error:
        return [], [str(error)]
    finally:
        installation.uninstall()


def options_of(cfg: Any) -> dict[str, Any]:
    """A recipe's options by the names that Megatron's arguments have."""
    found: dict[str, Any] = {}
    for section in SECTIONS:
        owner = getattr(cfg, section, None)
        if owner is not None and not isinstance(owner, str):
            found |= {name: value for name, value in vars(owner).items() if value is not None}
    for name, convert in _OTHERWISE.items():
        if name in found:
            found |= convert(found[name])
    return found


_OTHERWISE: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "num_moe_experts": lambda value: {"num_experts": value},
    "gated_linear_unit": lambda value: {"swiglu": bool(value)},
    "share_embeddings_and_output_weights": lambda value: {
        "untie_embeddings_and_output_weights": not value
    },
}
"""Fields that arguments have in another form."""
