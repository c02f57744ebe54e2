"""Known models by name, for tests of planning and of commands."""

from __future__ import annotations

from megatron_fsdp_adapter.tools.models.sources import PRESETS, from_options
from megatron_fsdp_adapter.tools.models.spec import ModelSpec


def model_named(name: str) -> ModelSpec:
    return from_options(PRESETS[name], name)
