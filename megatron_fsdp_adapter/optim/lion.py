"""The step of Lion (arxiv.org/abs/2302.06675) on shards, in one optimizer with the inner one
(`own_steps.py`). Each element is updated by itself, so that a shard's step is that of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .own_steps import Options, OwnSteps

AVERAGE = "exp_avg"
"""The name of Lion's state, as NVIDIA's emerging_optimizers have it."""


@dataclass(frozen=True)
class LionRule:
    """Which groups of an optimizer are Lion's, and how they are updated; lr and weight decay are
    the group's own.

    betas: an update has the sign of b m + (1 - b) g with the first; m <- b m + (1 - b) g with the
    second.

    Raises:
        ValueError: a beta is not 0 or more, and less than 1.
    """

    is_lion: Callable[[Options], bool]
    betas: tuple[float, float]

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"Lion with betas={self.betas}: use 0 or more, and less than 1")


class LionShards(OwnSteps):
    """Local shards of an optimizer of which Lion updates the groups that `rule` selects."""

    def __init__(
        self, rule: LionRule, optimizer: Any, skip_empty: bool, decoupled: bool
    ) -> None:
        self._rule = rule
        super().__init__(optimizer, skip_empty, decoupled)

    def state_names(self, group: Options) -> tuple[str, ...]:
        return (AVERAGE,) if self._rule.is_lion(group) else ()

    def step_own(self, groups: Sequence[Options]) -> None:
        """A tensor at a time: kernels for many would hold a copy of all averages."""
        first, second = self._rule.betas
        for group, pairs in zip(groups, self.pairs, strict=True):
            if not self._rule.is_lion(group):
                continue
            lr, decay = float(group["lr"]), group["weight_decay"]
            for _, local in pairs:
                grad = self.gradient(local)
                if grad is None:
                    continue
                average = self.completed(local, (AVERAGE,))[AVERAGE]
                direction = average.lerp(grad, 1 - first).sign_()
                average.lerp_(grad, 1 - second)
                if decay != 0:
                    local.mul_(1 - lr * decay)
                local.add_(direction, alpha=-lr)
