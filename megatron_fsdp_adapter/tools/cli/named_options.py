"""Options given by name instead of a command line: `--set option=value`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

from megatron_fsdp_adapter.megatron.options import option, sizes, support, validation
from megatron_fsdp_adapter.megatron.options.settings import SETTINGS
from megatron_fsdp_adapter.tools.models.spec import OPTIONS
from megatron_fsdp_adapter.tools.prove import scale_down, source

ARGUMENTS = (
    "bias_gelu_fusion", "bias_swiglu_fusion", "decrease_batch_size_if_needed", "fp4_format",
    "fp8_format", "global_batch_size", "micro_batch_size", "quick_geglu", "recompute_activations",
    "rotary_base", "rotary_percent", "separate_all_gather_groups", "squared_relu",
    "start_weight_decay",
)  # fmt: skip
"""Arguments of Megatron-LM that are read here, but are in no config and no table."""


def known_options() -> set[str]:
    """Names valid for `--set`: fields of the configs of the installed megatron-core and of ours,
    and arguments of Megatron-LM that are read here. Empty without megatron-core."""
    try:
        from megatron_fsdp_adapter.megatron.compat import core_api
        from megatron_fsdp_adapter.megatron.options.ddp_config import DistributedDataParallelConfig
    except ModuleNotFoundError:  # which `bindings` reports
        return set()
    own = dataclasses.fields(DistributedDataParallelConfig)
    return {
        *core_api.config_fields(),
        *(one.name for one in own),
        *OPTIONS,
        *source.ALIASES,
        *scale_down.SIZES,
        *scale_down.UNSUPPORTED,
        *scale_down.DROPPED,
        *validation.known_arguments(),
        *sizes.NAMES,
        *(row.option for row in SETTINGS),
        *ARGUMENTS,
    }


def named_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of `--set` by name. Raises ValueError for unknown names, missing values, and sizes
    that are not above 0. Without megatron-core every name is accepted."""
    chosen = dict(map(_assignment, given))
    known = known_options()
    wrong = []
    for name, value in chosen.items():
        if known and name not in known:
            remedy = _remedy(name, known)
            wrong.append(f"--set {name}={value}: unknown option. {remedy}")
    wrong += [f"--set {line}" for line in sizes.not_above_zero(chosen)]
    if wrong:
        raise ValueError("\n".join(wrong))
    return chosen


def _remedy(name: str, known: set[str]) -> str:
    """A remedy for an unknown name: the shortest known names that contain it, else similar ones,
    two at most."""
    longer = sorted((one for one in known if name in one), key=lambda one: (len(one), one))
    near = longer[:2] or difflib.get_close_matches(name, sorted(known), 2)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return "Leave it out."


def _assignment(text: str) -> tuple[str, Any]:
    """Name and value of `option=value`. The value is a Python literal, the name of a dtype, or else
    text. Raises ValueError without a value."""
    name, separator, value = text.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    if not separator:
        raise ValueError(f"--set {text}: no value. Write option=value.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, option.DTYPES.get(value, value)


def optimizer_options() -> dict[str, Any]:
    """Defaults of the options of optimizers that only some releases have, from the installed
    megatron-core.

    From these names rules tell which optimizers Megatron-LM supports; its arguments have the same
    names."""
    try:
        from megatron_fsdp_adapter.megatron.compat import core_api
    except ModuleNotFoundError:  # no megatron-core, which `bindings` reports
        return {}
    fields = core_api.optimizer_defaults()
    return {name: value for name, value in fields.items() if name.startswith(support.EMERGING)}
