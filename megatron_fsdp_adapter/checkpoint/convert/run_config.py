"""Megatron-Bridge's config, a YAML file beside the weights, in place of Megatron-LM's arguments."""

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
"""Field of the model's config -> Megatron-LM's argument with another name."""


_OF_GROUPS = {
    "optimizer": ("apply_wd_to_qk_layernorm", "decoupled_lr"),
    "scheduler": ("no_weight_decay_cond_type",),
}
"""Section -> options that parameter groups are made by."""


def with_arguments(rest: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of `rest`. If it has no arguments and `folder` has a `run_config.yaml`, the copy has
    that file's. Raises ValueError if the file cannot be read."""
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
        raise ValueError(f"{path} has no section `model`, which describes the model of the weights")
    arguments = {}
    for field, value in model.items():
        name = str(field)
        arguments[_ARGUMENTS.get(name, name)] = _plain(value)
    for section, names in _OF_GROUPS.items():
        options = content.get(section)
        for name in names if isinstance(options, Mapping) else ():
            arguments.setdefault(name, options.get(name))
    return Namespace(**arguments)


def _plain(value: Any) -> Any:
    """`value`, or the name of what it stands for: the file has a function, a class or a dtype as a
    mapping with `_target_`."""
    if isinstance(value, Mapping):
        return value.get("_target_", value)
    return value
