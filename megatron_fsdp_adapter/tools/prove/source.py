"""Reads the options of a run from a command line of Megatron-LM or of this repository's training
script, or from a preset. Option names are those of Megatron's configs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_fsdp_adapter.launch import megatron_lm, runner
from megatron_fsdp_adapter.megatron.options import sizes, validation
from megatron_fsdp_adapter.megatron.options.settings import Change
from megatron_fsdp_adapter.tools.models.spec import flag
from megatron_fsdp_adapter.tools.prove.scale_down import Options, ranks_over

BASE: Options = {
    **validation.PLAIN_OPTIONS,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "micro_batch_size": 1,
    "seq_length": 4096,
}
"""Values of options that a preset does not have."""


@dataclass(frozen=True)
class Recipe:
    """A run: the source of its options, the options, changes to them, and the folder from which
    Megatron is imported (None: the installed one)."""

    source: str
    options: Options
    changes: tuple[Change, ...]
    folder: Path | None = None


def of_script(script: Path, arguments: Sequence[str], world_size: int | None) -> Recipe:
    """The recipe of a training script's command line. world_size: None if unknown. Raises
    ValueError if it cannot be parsed or is invalid."""
    folder = script.resolve().parent
    if (folder / "lib" / "options.py").is_file():  # this repository's training script
        raise ValueError(f"{script}: not Megatron-LM's. Give its preset by --config instead")
    args: Any = runner.parse_arguments(script, arguments)
    changes = []
    if not args.use_megatron_fsdp:
        args.use_megatron_fsdp = True
        reason = "not given; the proof sets it"
        changes.append(Change(megatron_lm.FSDP_FLAG, False, True, reason))
    return _finished(
        f"{script} with its command line", args, arguments, changes, world_size, folder
    )


def of_options(options: Options, source: str, world_size: int | None) -> Recipe:
    """The recipe of a preset with defaults. world_size: None if unknown. Raises ValueError if it is
    invalid."""
    args = SimpleNamespace(**BASE)
    for name, value in options.items():
        setattr(args, name.replace("-", "_"), value)
    # As on a command line, an option that the preset sets is not changed.
    return _finished(source, args, [flag(name) for name in options], [], world_size, None)


def _finished(
    source: str,
    args: Any,
    arguments: Sequence[str],
    changes: list[Change],
    world_size: int | None,
    folder: Path | None,
) -> Recipe:
    """The recipe of `args`, after Megatron-LM's launch has completed and checked them.

    arguments: the words of the command line, which are not changed. changes: those already made."""
    if not hasattr(args, "outer_dp_sharding_strategy"):
        args.outer_dp_sharding_strategy = "no_shard"
    if not hasattr(args, "ckpt_format"):
        args.ckpt_format = None
    changes += megatron_lm.complete(args, arguments)
    # Ranks of a proof set this variable themselves.
    environment = {k: v for k, v in os.environ.items() if k != validation.CONNECTIONS}
    wrong = validation.launch_problems(args, environment)
    options = vars(validation.launch_options(args))
    wrong += sizes.size_problems(options, world_size)
    if wrong:
        lines = [f"  - {problem}" for problem in wrong]
        raise ValueError("\n".join(["the configuration is invalid:", *lines]))
    return Recipe(source, _named_like_configs(options, world_size or 1), tuple(changes), folder)


ALIASES: Mapping[str, str] = {
    "rope_fusion": "apply_rope_fusion",
    "norm_epsilon": "layernorm_epsilon",
}
"""Argument of Megatron-LM -> the config's field that it sets."""


def _named_like_configs(options: Options, world_size: int) -> dict[str, Any]:
    """The options by the names of config fields, with the values that Megatron derives from others
    before it builds anything. Raises ValueError if a size of the model is missing."""
    found = dict(options)
    for argument, field in ALIASES.items():
        if argument in found:
            found.setdefault(field, found.pop(argument))
    if found.pop("disable_bias_linear", False):
        found["add_bias_linear"] = False
    if found.get("recompute_activations") and not found.get("recompute_granularity"):
        found["recompute_granularity"] = "selective"
    found.setdefault("position_embedding_type", "learned_absolute")
    found["num_moe_experts"] = found.get("num_moe_experts") or found.get("num_experts")
    found["original_data_parallel_size"] = max(1, world_size // ranks_over(found))
    if not found.get("expert_tensor_parallel_size"):
        found["expert_tensor_parallel_size"] = found.get("tensor_model_parallel_size") or 1
    required = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    missing = [name for name in required if not found.get(name)]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not given")
    return found
