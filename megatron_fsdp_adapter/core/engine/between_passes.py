"""Reading and writing of main weights between passes, while modules show sharded parameters."""

from __future__ import annotations

from typing import Any

import torch

from megatron_fsdp_adapter.core.config import EngineConfig

from .buffer import MAIN_WEIGHTS, check_here
from .gather import GatherPipeline
from .group import ParamGroup
from .params import ParameterSwitch
from .quantized import QuantizedWeights
from .step import Step


class BetweenPasses:
    """Base class of the engine, which assigns these attributes."""

    config: EngineConfig
    gather: GatherPipeline
    groups: list[ParamGroup]
    quantization: QuantizedWeights | None
    switch: ParameterSwitch
    step: Step
    away: dict[str, Any]

    def to_unsharded(self) -> None:
        """Shows unsharded parameters; the engine implements it."""
        raise NotImplementedError

    def to_sharded(self) -> None:
        """Shows sharded parameters."""
        check_here(self.away, "reading or writing main weights", [MAIN_WEIGHTS])
        self.gather.updates.settle()
        self.switch.show(unsharded=False, before=self.gather.give_up)

    def show_between_passes(self) -> None:
        """Shows sharded parameters, unless a forward runs or waits for its backward."""
        if self.step.awaits_nothing and not self.away:
            self.to_sharded()

    def mark_main_weights_stale(self) -> None:
        """Main weights in host memory may have been written: the next gather reads them."""
        self.gather.updates.drop_loads()
        for group in self.groups:
            group.main.changed()

    @torch.no_grad()
    def bring_up_to_date(self) -> None:
        """Makes main weights readable, and quantized weights equal to them in each rank's own
        rows. Collective if main weights have changed."""
        self.gather.updates.settle()
        if self.quantization is not None and not self.switch.shows_unsharded:
            self.quantization.catch_up()

    @torch.no_grad()
    def sync_weights(self, wait: bool) -> None:
        """Makes weights current for the next forward. Gathers all of them now with `wait`, or
        without overlap; else only launches what that forward needs first."""
        self.to_unsharded()
        if wait or not self.config.overlap_param_gather:
            self.gather.unshard_all()
        else:
            self.gather.unshard_first()
