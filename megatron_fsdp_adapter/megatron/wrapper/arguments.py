"""The arguments of the wrapper's constructor, and values that depend only on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...build.materialize import InitializerOf, target_device
from ...plan.placement import LEAVE, placement_of
from .core_init import core_initializers


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
        """True if the parameter of this name is sharded; False if it is left as it is."""
        return placement_of(self.module_placements, fqn) != LEAVE

    @cached_property
    def device(self) -> torch.device:
        """The device of the flat buffers."""
        return target_device(self.module, self.given_device)

    @cached_property
    def initializer_of(self) -> InitializerOf:
        """A function of a module that returns its initializer, for modules on the meta device."""
        return core_initializers(self.config)
