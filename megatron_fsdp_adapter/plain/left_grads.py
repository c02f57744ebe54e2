"""Gradients that are left where the engine does not expect them: by a backward that has raised, or
by one that no hook of the engine has seen."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence

from ..core.engine.grad_states import GradState
from ..core.engine.group import ParamGroup
from ..core.engine.params import ParamPair


class Earlier(enum.Enum):
    """The gradients that are there when a backward begins."""

    NONE = "none"
    # Those of sharded parameters, which the program can clear.
    ATTACHED = "attached"
    # Sums of backwards that did not end their step.
    UNATTACHED = "unattached"


def refuse_sums(
    groups: Iterable[ParamGroup],
    pairs: Iterable[ParamPair],
    earlier: Earlier,
    attached: Collection[ParamPair],
) -> None:
    """RuntimeError if a backward that raised has added gradients of `groups` to `earlier` ones.

    pairs: of all trained parameters. attached: those whose earlier gradients are still there."""
    added = {group for group in groups if group.grads.state is not GradState.EMPTY}
    mixed = []
    for pair in pairs:
        is_there = earlier is Earlier.UNATTACHED or pair in attached
        if pair.group in added and is_there and earlier is not Earlier.NONE:
            mixed.append(pair.managed.fqns[0])
    if mixed:
        raise RuntimeError(
            f"a backward raised after it had added gradients of {len(mixed)} parameters "
            f"({mixed[:3]}) to those of an earlier backward. Forget both, and repeat the step: by "
            "zero_grad(), or by reset_iter_state() after set_requires_gradient_sync(False)"
        )


def refuse_untaken(groups: Iterable[ParamGroup]) -> None:
    """RuntimeError if a backward has given gradients, and no hook of the engine has seen it."""
    for group in groups:
        if group.key.requires_grad and group.grads.has_untaken():
            names = [entry.fqns[0] for entry in group.managed]
            raise RuntimeError(
                "a backward that went through no output of the model gave a gradient to one of "
                f"the parameters {names[:4]}, and no other rank has it. Add its loss to the loss "
                "of the model, and run one backward for both"
            )


def forget_absent(dropped: Iterable[ParamPair], pairs: Sequence[ParamPair]) -> None:
    """Forgets the gradients of groups of `dropped` all of whose parameters have none: the next
    backward need not add to any. pairs: of all trained parameters."""
    for group in {pair.group for pair in dropped}:
        if group.grads.are_whole and all(
            pair.sharded.grad is None for pair in pairs if pair.group is group
        ):
            group.grads.drop(collected=False)
