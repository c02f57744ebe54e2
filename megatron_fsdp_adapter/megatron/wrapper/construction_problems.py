"""Everything that is wrong with the arguments of a wrapper's constructor, found before anything is
made of them, so that all of it can be raised at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...build.materialize import InitializerOf, meta_problems, target_device
from ...core.distributed_index import FSDPDistributedIndex
from ...core.problems import raise_problems
from ...plan.module_problems import module_problems
from ...plan.placement import LEAVE, placement_of, placement_problems
from ..compat import core_api
from ..options import capability, validation
from ..options.table import MAIN_PARAMS, read
from .core_init import core_initializers
from .core_support import require_supported_core
from .domains import read_index
from .group_problems import group_problems, group_ranks
from .model_problems import model_problems


@dataclass(frozen=True)
class Arguments:
    """The arguments of a wrapper's constructor."""

    config: Any
    ddp_config: Any
    module: nn.Module
    unit_classes: list[type[nn.Module] | str] | None
    given_device: torch.device | None
    pg_collection: Any | None
    module_placements: Mapping[str, str]

    def manages(self, fqn: str) -> bool:
        """True if the parameter of this name is sharded, and not left as it is."""
        return placement_of(self.module_placements, fqn) != LEAVE

    @cached_property
    def device(self) -> torch.device:
        """The device of the flat buffers."""
        return target_device(self.module, self.given_device)

    @cached_property
    def initializer_of(self) -> InitializerOf:
        """The function that gives values to modules on the meta device."""
        return core_initializers(self.config)


def checked_index(given: Arguments) -> FSDPDistributedIndex:
    """The index over the process groups. Collective where the wrapper makes groups.

    Raises:
        RuntimeError: this megatron-core is not supported.
        ValueError: with everything that is wrong with the arguments.
    """
    require_supported_core()
    config, ddp_config, module = given.config, given.ddp_config, given.module
    found = [
        *validation.wrapper_problems(
            config, ddp_config, given.device, core_api.asks_tokens_on_the_host()
        ),
        *capability.device_problems(config, given.device),
        *module_problems(
            module, given.unit_classes, given.given_device,
            read(ddp_config, MAIN_PARAMS), given.manages,
            may_be_frozen=config.pipeline_model_parallel_size > 1,  # of a stage
        ),
        *model_problems(module, config, ddp_config),
        *meta_problems(module, config.init_model_with_meta_device, given.initializer_of),
        *placement_problems(given.module_placements, module),
        *group_problems(config, group_ranks(given.pg_collection)),
    ]  # fmt: skip
    index, of_groups = read_index(module, config, ddp_config, given.device, given.pg_collection)
    raise_problems("FullyShardedDataParallel", found + of_groups)
    assert index is not None  # or there were problems
    return index
