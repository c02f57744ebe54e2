"""The progress of a group's gradients in a step, and the transitions that are legal."""

from __future__ import annotations

import enum


class GradState(enum.Enum):
    """The progress of a step's gradients. FINISHED only where there is an outer axis."""

    EMPTY = "empty"  # none yet
    ACCUMULATED = "accumulated"  # summed on this rank
    REDUCED = "reduced"  # over the shard axis
    FINISHED = "finished"  # over the outer axis as well

    __hash__ = object.__hash__  # Enum's own is a function of Python's


REDUCED_STATES = (GradState.REDUCED, GradState.FINISHED)
"""States in which the main gradients have values."""

Transition = tuple[GradState, GradState]

TRANSITIONS = {
    # Gradients that are kept over microbatches are added one to the other, and reduced once.
    (GradState.EMPTY, GradState.ACCUMULATED),
    (GradState.ACCUMULATED, GradState.ACCUMULATED),
    (GradState.ACCUMULATED, GradState.REDUCED),
    # Others are reduced in each backward.
    (GradState.EMPTY, GradState.REDUCED),
    (GradState.REDUCED, GradState.REDUCED),
    # They are forgotten, in any state.
    (GradState.EMPTY, GradState.EMPTY),
    (GradState.ACCUMULATED, GradState.EMPTY),
    (GradState.REDUCED, GradState.EMPTY),
    (GradState.FINISHED, GradState.EMPTY),
}
"""Transitions that are legal in every group."""

ONE_RANK = {(GradState.REDUCED, GradState.ACCUMULATED)}
"""If the shard axis has one rank: a further backward takes the reduction back."""

OUTER_AXIS = {(GradState.REDUCED, GradState.FINISHED)}
"""If there is an outer axis."""

REPLICAS = {(GradState.FINISHED, GradState.REDUCED)}
"""If the ranks of the outer axis end with equal gradients: before a further backward each of them
keeps an equal part."""


BESIDE = {(GradState.REDUCED, GradState.ACCUMULATED), (GradState.FINISHED, GradState.ACCUMULATED)}
"""If sums may be kept beside reduced gradients: those are forgotten, and the sums stay."""


def legal_transitions(
    one_rank: bool, outer: bool, splits_outer: bool, beside: bool = False
) -> set[Transition]:
    """The legal transitions of a group.

    one_rank: its shard axis has one rank. outer: it has an outer axis. splits_outer: gradients are
    sharded over that one too. beside: sums may be kept beside reduced gradients.
    """
    legal = set(TRANSITIONS)
    if beside:
        legal |= BESIDE
    if one_rank:
        legal |= ONE_RANK
    if outer:
        legal |= OUTER_AXIS
    if outer and not splits_outer:
        legal |= REPLICAS
    return legal
