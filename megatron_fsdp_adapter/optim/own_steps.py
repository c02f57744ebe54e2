"""Local shards of an optimizer of which some parameter groups are stepped here.

A group is the inner optimizer's, Adam's in a run of Megatron, or one of those that this package
steps itself, Muon's or Lion's. So one optimizer holds all parameters, as core's own for sharded
weights does; a gradient norm, clipping and a checkpoint know nothing of it. These groups are
stepped in the hook in front of the inner optimizer's step, which finds them without parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .local_optimizer import Clip, LocalShards

Options = dict[str, Any]
"""A parameter group."""


class OwnSteps(LocalShards):
    """Subclasses select their groups, make the state of a parameter, and do the step."""

    _stepped = False

    def __init__(self, optimizer: Any, skip_empty: bool, decoupled: bool) -> None:
        self._uncounted: list[Options] = []
        super().__init__(optimizer, skip_empty, decoupled)

    def state_names(self, group: Options) -> tuple[str, ...]:
        """Names of what is kept of each parameter of a group, in its shape; empty for a group that
        is the inner optimizer's."""
        raise NotImplementedError

    def step_own(self, groups: Sequence[Options]) -> None:
        """Updates the local tensors of the groups that are stepped here, of all of an optimizer's;
        their gradients are there."""
        raise NotImplementedError

    def own_groups(self, optimizer: Any) -> dict[int, Options]:
        """The groups that are stepped here, by their place."""
        groups = enumerate(optimizer.param_groups)
        return {number: group for number, group in groups if self.makes_own(group)}

    def gradient(self, local: torch.Tensor) -> torch.Tensor | None:
        """In the dtype of the local tensor; None if the parameter has none."""
        given = getattr(local, "decoupled_grad" if self.decoupled else "grad", None)
        return None if given is None else given.to(local.dtype)

    # State.

    def makes_own(self, group: Options) -> bool:
        return bool(self.state_names(group))

    def made_state(self, optimizer: Any) -> None:
        """Zeros, where a group that is stepped here has no state yet."""
        for number, group in self.own_groups(optimizer).items():
            for _, local in self.pairs[number]:
                self.completed(local, self.state_names(group))

    def completed(self, local: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The state of a local tensor, with zeros for what is not there."""
        state = self.state[local]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(local)
        return state

    # A step.

    def takes_clip(self, clip: Clip) -> bool:
        """Gradients are read as they are."""
        return False

    def begin(self, optimizer: Any) -> None:
        """Steps these groups; the step that was asked for finds them without parameters."""
        if self._stepped:
            return  # a step of a subclass that calls its base's
        super().begin(optimizer)
        self._stepped = True
        try:
            with torch.no_grad():
                self.step_own(optimizer.param_groups)
        except BaseException:
            self.leave(optimizer)
            raise
        for group in self.own_groups(optimizer).values():
            group["params"] = []
            if "step" not in group:
                self._uncounted.append(group)

    def leave(self, optimizer: Any) -> None:
        self._stepped = False
        for group in self._uncounted:  # newer fused optimizers count for empty groups too
            group.pop("step", None)
        self._uncounted.clear()
        super().leave(optimizer)
