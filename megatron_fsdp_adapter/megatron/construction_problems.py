"""Everything that is wrong with what a wrapper's constructor was given, found before anything is
made of it, so that all of it can be raised at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core.topology import FSDPDistributedIndex
from ..sharding.materialize import InitializerOf, meta_problems
from ..sharding.module_problems import module_problems
from ..sharding.placement import Placements
from . import activation_offload
from .compat import core_api
from .domains import read_index
from .model_problems import model_problems
from .options import (
    arguments,
    capability,
    ddp_options,
    validation,
)


def construction_problems(
    config: Any,
    ddp_config: Any,
    module: nn.Module,
    unit_classes: list[type[nn.Module] | str] | None,
    device: torch.device | None,
    pg_collection: Any | None,
    *,
    target: torch.device,
    placements: Placements,
    initializer_of: InitializerOf,
) -> tuple[FSDPDistributedIndex | None, list[str]]:
    """The index over the process groups, None only if there are problems, and the problems. The
    first arguments are the constructor's; `target`: the device of the buffers. Collective where
    the wrapper makes groups."""
    found = [
        *validation.wrapper_problems(
            config, ddp_config, target, core_api.asks_tokens_on_the_host()
        ),
        *capability.device_problems(config, target),
        *activation_offload.problems(config),
        *module_problems(
            module, unit_classes, device, ddp_options.main_params_dtype(ddp_config),
            placements.manages,
        ),
        *model_problems(module, config, ddp_config),
        *meta_problems(module, config.init_model_with_meta_device, initializer_of),
        *placements.problems(module),
        *arguments.group_problems(config, arguments.group_ranks(pg_collection)),
    ]  # fmt: skip
    index, of_groups = read_index(module, config, ddp_config, target, pg_collection)
    return index, found + of_groups
