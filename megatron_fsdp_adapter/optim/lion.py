"""The step of Lion (arxiv.org/abs/2302.06675) on shards, in one optimizer with the inner one.
Each element is updated by itself, so that a shard's step is that of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .local_shards import LocalShards, UpdateRule
from .state import GroupOptions

AVERAGE = "exp_avg"
"""The name of Lion's state, as NVIDIA's emerging_optimizers have it."""


def lion(is_lions: Callable[[GroupOptions], bool], betas: tuple[float, float]) -> UpdateRule:
    """The rule of Lion. Learning rate and weight decay are options of each group.

    is_lions: True for the groups that it updates. betas: b1 and b2, 0 or more and less than 1. The
    update has the sign of b1 m + (1 - b1) g; then m <- b2 m + (1 - b2) g.
    """
    first, second = betas

    def update(shards: LocalShards, groups: Sequence[GroupOptions]) -> None:
        """Updates a tensor at a time: kernels for many would hold a copy of all averages."""
        for group, pairs in zip(groups, shards.pairs, strict=True):
            if not is_lions(group):
                continue
            lr, decay = float(group["lr"]), group["weight_decay"]
            for _, local in pairs:
                grad = shards.gradient(local)
                if grad is None:
                    continue
                average = shards.completed(local, (AVERAGE,))[AVERAGE]
                direction = average.lerp(grad, 1 - first).sign_()
                average.lerp_(grad, 1 - second)
                if decay != 0:
                    local.mul_(1 - lr * decay)
                local.add_(direction, alpha=-lr)

    return UpdateRule(lambda group: (AVERAGE,) if is_lions(group) else (), update)
