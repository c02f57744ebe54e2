"""What Megatron-Bridge saves where Megatron-LM saves its arguments: its config, in a YAML file
beside the weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

RUN_CONFIG = "run_config.yaml"

_ARGUMENTS = {
    "layernorm_epsilon": "norm_epsilon",
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
}
"""Fields of the model's config that are arguments under another name."""


def with_arguments(rest: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`rest` of the checkpoint in `folder`; without arguments of its own, with those that a
    `run_config.yaml` tells, if there is one. ValueError if that cannot be read."""
    path = folder / RUN_CONFIG
    if rest.get("args") or not path.is_file():
        return dict(rest)
    return {**rest, "args": _arguments(path)}


def _arguments(path: Path) -> Namespace:
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML ({error})") from error
    model = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(model, Mapping):
        raise ValueError(f"{path} has no section model, which tells what the weights are of")
    named = {str(name): _named(value) for name, value in model.items()}
    return Namespace(**{_ARGUMENTS.get(name, name): value for name, value in named.items()})


def _named(value: Any) -> Any:
    """The name, where the value is a function, a class or a dtype."""
    return value.get("_target_", value) if isinstance(value, Mapping) else value
