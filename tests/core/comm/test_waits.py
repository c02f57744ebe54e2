"""The proofs and reports that follow from what ranks publish about a wait, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_fsdp_adapter.core.comm import waits
from megatron_fsdp_adapter.core.comm.communicator import KEPT
from megatron_fsdp_adapter.core.comm.waits import END, EngineState, RankState

CHECKS = ("core/comm/waits.py", "core/comm/communicator.py")

SET = "all ranks"
KEY = (SET, 0)


def launches(*names: str) -> list[str]:
    """ "a" gathers weights of the unit a, "-a" reduces its gradients."""
    found = []
    for name in names:
        if name == END:
            found.append(name)
        elif name.startswith("-"):
            found.append(f"gradients of {name[1:]}/dense reduced")
        else:
            found.append(f"weights of {name}/dense gathered")
    return found


def engine(*names: str, before: Sequence[str] = (), step: int = 0, **more: Any) -> EngineState:
    numbers = more.pop("numbers", {SET: 0})
    return EngineState(numbers, True, step, launches(*before), launches(*names), **more)


def rank(number: int, *names: str, **more: Any) -> RankState:
    """A rank with these launches, which waits for the last of them unless `more` says else."""
    own = more.pop("engine", engine(*names))
    values = {"waits_in": 0, "waits_at": (own.step, own.position[1] - 1), "engines": [own], **more}
    return RankState(number, **values)


def proof_of(*states: RankState) -> waits.Proof | None:
    """From what the ranks read in the store."""
    return waits.proof({s.rank: RankState.from_text(s.to_text()) for s in states}, SET)


OTHER_UNIT = (rank(0, "root", "tower"), rank(1, "root", "lm"))
BARRIER = {"waits_in": None, "collective": "torch.distributed.barrier", "members": [0, 1, 2]}
OTHER_MODEL = engine("d", numbers={SET: 1})

PROOFS: dict[str, tuple[tuple[RankState, ...], tuple[str, ...]]] = {
    "another unit": (
        OTHER_UNIT,
        (
            "rank 0 waits for the weights of `tower`; rank 1 has not yet called `tower` in this "
            "step and waits for the weights of `lm`",
            "since launch 2 of step 1",
        ),
    ),
    "hosts that run ahead": (
        tuple(replace(one, waits_in=None, runs_ahead=True) for one in OTHER_UNIT),
        ("rank 0 has launched the weights of `tower`; rank 1 has not yet called `tower`",),
    ),
    "another rank is equal": (
        (*OTHER_UNIT, rank(2, "root", "lm"), rank(3, "root")),
        ("rank 0: the weights of `tower`", "ranks 1, 2: the weights of `lm`"),
    ),
    "gradients of another unit": (
        (rank(0, "a", "-a"), rank(1, "a", "-b")),
        ("rank 1 has not yet launched the gradients of `a` in this step and waits for the grad",),
    ),
    "one has ended the step": (
        (
            rank(0, "a", "-a", "a"),
            rank(1, engine=engine(before=["a", "-a"], step=1), waits_at=(0, 2)),
        ),
        ("rank 0 waits for the weights of `a`; rank 1 waits for the end of the step",),
    ),
    "in the step before": (
        (
            rank(0, engine=engine("a", before=["a", "b"], step=1)),
            rank(1, engine=engine("a", before=["b", "a"], step=1)),
        ),
        ("since launch 1 of step 1",),
    ),
    "one was not called": (
        (
            rank(0, engine=engine("a", calls={"a": 1, "b": 1})),
            rank(1, engine=engine("b", calls={"a": 0, "b": 1})),
        ),
        ("rank 0: one call of `a` in the last", "rank 1: no call of `a` in the last"),
    ),
    "ended": (
        (rank(0, "a", "b"), rank(1, "a", ended="ValueError: no image", waits_in=None)),
        (
            "rank 0 waits for the weights of `b` (step 1); rank 1 has ended (ValueError: no "
            "image); its last launch was the weights of `a`",
        ),
    ),
    "deleted": (
        (
            rank(0, "a", "b"),
            rank(1, "a", waits_in=None),
            rank(2, engine=replace(engine("a"), exists=False), waits_in=None),
        ),
        ("rank 2 has deleted its model",),
    ),
    "in a barrier": (
        (rank(0, "a", "b"), rank(1, "a", place="in f (x.py:3)", **BARRIER), rank(2, "a", "b")),
        ("rank 1 waits in torch.distributed.barrier, in f (x.py:3), which rank 0 has not called",),
    ),
    "in another model": (
        (
            RankState(0, waits_in=0, engines=[engine("g"), replace(OTHER_MODEL, launches=[])]),
            RankState(1, waits_in=1, engines=[engine(), OTHER_MODEL]),
        ),
        ("rank 0 waits for the weights of `g`", "rank 1 waits for the weights of `d` of another"),
    ),
}
"""What ranks have published, and what the error says."""


@pytest.mark.parametrize("name", PROOFS)
def test_ranks_that_can_never_go_on_are_told_why(name: str) -> None:
    states, told = PROOFS[name]
    proof = proof_of(*states)
    assert proof is not None
    for text in told:
        assert text in proof.text
    assert proof.text.endswith(waits.REMEDY)
    assert proof.stays == (name not in ("in a barrier", "in another model"))


GOES_ON = {
    "late": (rank(0, "a", "b"), rank(1, "a", waits_in=None)),
    "late in a step before": (
        rank(0, engine=engine("a", before=["a", "-a"], step=1)),
        rank(1, "a", waits_in=None),
    ),
    "equal": (rank(0, "a", "b"), rank(1, "a", "b")),
    "ended behind all that is waited for": (rank(0, "a"), rank(1, "a", ended="has exited")),
    "deleted behind all that is waited for": (
        rank(0, "a"),
        rank(1, engine=replace(engine("a"), exists=False), waits_in=None),
    ),
    "in a barrier that a late rank has not called": (
        rank(0, "a", "b"),
        rank(1, "a", **BARRIER),
        rank(2, "a", waits_in=None),
    ),
    "in a barrier that a rank without a sign has not called": (
        rank(0, "a", "b"),
        rank(1, "a", **BARRIER),
    ),
    "in a barrier of others": (
        rank(0, "a", "b"),
        rank(1, "a", **{**BARRIER, "members": [1, 3]}),
        rank(2, "a", "b"),
    ),
    "both in the barrier": (
        rank(0, "a", "b", **BARRIER),
        rank(1, "a", **BARRIER),
        rank(2, "a", **BARRIER),
    ),
    "hosts ahead in other models": (
        RankState(0, runs_ahead=True, engines=[engine("g"), replace(OTHER_MODEL, launches=[])]),
        RankState(1, runs_ahead=True, engines=[engine(), OTHER_MODEL]),
    ),
    "launches that are no longer known": (
        rank(0, engine=engine("b", skipped=KEPT)),
        rank(1, "a", waits_in=None),
    ),
    "other sets": (rank(0, "a"), rank(1, engine=engine("b", numbers={"others": 0}))),
}
"""None of these is a proof."""


@pytest.mark.parametrize("name", GOES_ON)
def test_ranks_that_may_go_on_are_no_error(name: str) -> None:
    assert proof_of(*GOES_ON[name]) is None


def test_a_rank_that_is_late_is_reported_with_its_place() -> None:
    states = {
        0: rank(0, "a", "b", still_s=9.0),
        1: rank(1, "a", waits_in=None, still_s=11.2, place="in load (data.py:3)"),
        2: rank(2, "a", "b"),
    }
    text = waits.report(states, SET, range(4), 0)
    assert text == (
        "rank 0 has waited 9 s for the weights of `b`: rank 1 has launched nothing for 11 s, in "
        "load (data.py:3); its last launch was the weights of `a`; rank 3 gives no sign: its "
        "process is stopped, has ended, or is at work"
    )
    assert waits.report(states, SET, [0, 2], 0) == ""


def test_many_ranks_are_not_all_named() -> None:
    assert waits.ranks_in_words([3]) == "rank 3"
    assert waits.ranks_in_words(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
