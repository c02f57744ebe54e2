"""Gradients in the user's hands: `.grad` of the sharded parameters, from the end of a step's
reductions to the next backward.

There the user may do what torch allows with `.grad`: read it, change it, replace it, run hooks on
it, or clear it with any `zero_grad`, or none. Shards of gradients follow that when the next pass
begins. Watching the attribute instead was rejected: torch has no hook for `p.grad = None`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .group import GradState
from .identity import ParamPair


class OptimizerGrads:
    """Attributes:
    attached: whether `.grad` of the sharded parameters are the step's gradients.
        False from the beginning of a backward until all that it gave is reduced.
    """

    def __init__(self, pairs: Sequence[ParamPair]) -> None:
        self.attached = False
        self._given: dict[int, ParamPair] = {}
        groups = {id(pair.group): pair.group for pair in pairs if pair.grad is not None}
        self._members = [
            (group, [pair for pair in pairs if pair.group is group]) for group in groups.values()
        ]

    def attach(self) -> None:
        """Gives every parameter its reduced gradient. A frozen one gets none, so that no optimizer
        moves it."""
        for group, pairs in self._members:
            if group.grad_state is GradState.EMPTY:
                continue
            for pair in pairs:
                if pair.sharded.requires_grad or pair.sharded.grad is not None:
                    pair.attach_grad()
                    self._given[id(pair)] = pair
        self.attached = True

    def changed_by_user(self) -> tuple[list[ParamPair], list[ParamPair]]:
        """Whose gradient the user has taken away, and whose he has replaced by another tensor,
        since it was attached."""
        cleared = [pair for pair in self._given.values() if pair.is_cleared]
        replaced = [
            pair
            for pair in self._given.values()
            if not pair.is_cleared and pair.sharded.grad is not pair.grad
        ]
        return cleared, replaced

    def clear(self, chosen: Collection[ParamPair], collected: bool) -> None:
        """Forgets the gradients of `chosen`. The shard of a group goes when none of its parameters
        has a gradient; until then theirs are zeros in it. No reduction may be in flight.

        collected: also what a backward has left on the unsharded parameters.
        """
        ids = {id(pair) for pair in chosen}
        for pair in chosen:
            pair.drop_grad()
            self._given.pop(id(pair), None)
        for group, pairs in self._members:
            mine = [pair.index for pair in pairs if id(pair) in ids]
            others = [pair for pair in pairs if id(pair) not in ids]
            has_others = any(not self.attached or id(pair) in self._given for pair in others)
            if mine and has_others:
                group.zero_grads_of(mine, collected)
            elif mine:
                group.forget_grads(collected)
        self.attached &= any(group.grad_state is not GradState.EMPTY for group, _ in self._members)

    def drop_all(self) -> None:
        """Takes away all attached gradients, and those that the user has given."""
        for _, pairs in self._members:
            for pair in pairs:
                pair.drop_grad()
        self._given.clear()
        self.attached = False

    @property
    def given_by_user(self) -> bool:
        """Whether there is a `.grad` that no backward has given."""
        return not self.attached and any(
            pair.sharded.grad is not None for _, pairs in self._members for pair in pairs
        )

    def run_hooks(self) -> None:
        """Runs `register_post_accumulate_grad_hook` of the sharded parameters."""
        for _, pairs in self._members:
            for pair in pairs:
                hooks = pair.sharded._post_accumulate_grad_hooks  # type: ignore[attr-defined]
                if hooks and pair.sharded.grad is not None:
                    for hook in list(hooks.values()):
                        hook(pair.sharded)
