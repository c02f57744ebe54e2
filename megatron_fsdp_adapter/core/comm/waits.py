"""The facts that ranks publish about a wait, and the error or the report that follows from them.

That a rank waits proves nothing: another one may be late. These are proofs:

* two ranks have launched different collectives at one place of the same engine's step;
* a rank has ended, or has given up the engine, without a launch that another rank waits for;
* two ranks wait for each other: one in the engine, the other one in another engine or in a
  collective of the program.

A rank that is late for any other reason is reported, and no error.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

END = "the end of the step"
"""Stands behind the launches of a step that has ended."""
REMEDY = (
    "Call the same units in the same order and equally often on every rank, and use their outputs "
    "in its loss: call a unit that a rank's data does not need as well, and add its output times 0"
)
MOST_NAMED = 8
"""The number of ranks that are named, of those that do the same."""
LOOKED_AT = 16
"""The number of ranks that are examined, of those that are behind."""

Position = tuple[int, int]
"""A step, and a number of launches in it."""


@dataclass(frozen=True)
class EngineState:
    """The launches of one engine of a rank.

    Attributes:
        numbers: by name of a set of ranks, how many engines over that set were made before.
        exists: False if the engine was deleted.
        before, launches: in the step before, and in this one; without the first `skipped` ones.
        calls: by unit, how often the last forward has called it.
    """

    numbers: Mapping[str, int]
    exists: bool
    step: int
    before: Sequence[str]
    launches: Sequence[str]
    before_skipped: int = 0
    skipped: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)

    @property
    def position(self) -> Position:
        """The place of the next launch."""
        return self.step, self.skipped + len(self.launches)

    def text_at(self, position: Position) -> str | None:
        """The launch there in words; None if it is not known, or there is none yet."""
        step, index = position
        start, texts = self.known(step)
        return texts[index - start] if start <= index < start + len(texts) else None

    def known(self, step: int) -> tuple[int, Sequence[str]]:
        """The launches of a step whose words are known, behind the number of the first of them."""
        if step == self.step:
            return self.skipped, self.launches
        if step == self.step - 1:
            return self.before_skipped, [*self.before, END]
        return 0, []


@dataclass(frozen=True)
class RankState:
    """The facts about one rank.

    Attributes:
        ended: how the rank has ended; "" if it has not.
        still_s: seconds since its last launch.
        place: the line of the program that it is in, and that it compiles, if it does.
        collective, members: a collective of the program that the rank is in, and that returns only
            when all these members have called it.
        waits_in, waits_at: the engine, by place in `engines`, and the launch that the host waits
            for. None where the host waits for no launch, as with NCCL.
        runs_ahead: the host launches without waiting.
        beat: grows with each look of the rank.
    """

    rank: int
    ended: str = ""
    still_s: float = 0.0
    place: str = ""
    collective: str = ""
    members: Sequence[int] = ()
    waits_in: int | None = None
    waits_at: Position = (0, 0)
    runs_ahead: bool = False
    engines: Sequence[EngineState] = field(default_factory=list)
    beat: int = 0

    def engine(self, key: EngineKey) -> EngineState | None:
        """The engine with that number over that set of ranks."""
        name, number = key
        found = [one for one in self.engines if one.numbers.get(name) == number]
        return found[0] if found else None

    def needs(self, key: EngineKey, other: RankState) -> Position | None:
        """The first launch that this rank needs of `other` in that engine. None if there is none,
        or if this rank does not wait."""
        mine, its = self.engine(key), other.engine(key)
        if mine is None or its is None:
            return None
        if self.runs_ahead:
            return its.position if its.position < mine.position else None
        waits_here = self.waits_in is not None and self.engines[self.waits_in] is mine
        return self.waits_at if waits_here and its.position <= self.waits_at else None

    @property
    def waits_for(self) -> str:
        """The launch that the host waits for, in words; "" without one."""
        if self.waits_in is None:
            return ""
        return in_words(self.engines[self.waits_in].text_at(self.waits_at))

    def to_text(self) -> str:
        packed = zlib.compress(json.dumps(asdict(self)).encode(), level=1)
        return base64.b85encode(packed).decode()

    @classmethod
    def from_text(cls, text: str | bytes) -> RankState:
        values = json.loads(zlib.decompress(base64.b85decode(text)))
        values["engines"] = [EngineState(**one) for one in values["engines"]]
        values["waits_at"] = tuple(values["waits_at"])
        return cls(**values)


EngineKey = tuple[str, int]
"""A set of ranks, and the number of an engine over that set."""
States = Mapping[int, RankState]


def in_words(launch: str | None) -> str:
    """A launch in the model's words: "the gradients of `tower`"."""
    if launch is None:
        return "a launch that is no longer remembered"
    parts = re.fullmatch(r"(scales of weights from|weights of|gradients of) (\S+) .*", launch)
    if parts is None:
        return launch
    what, group = parts.groups()
    return f"the {what} `{unit_of(group)}`"


def unit_of(group: str) -> str:
    """The unit of a group: "tower" for "tower/dense"."""
    return group.rpartition("/")[0] or group


def ranks_in_words(ranks: Iterable[int]) -> str:
    every = sorted(ranks)
    named = ", ".join(str(rank) for rank in every[:MOST_NAMED])
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return f"rank{'s' if len(every) > 1 else ''} {named}{more}"


def first_difference(one: EngineState, other: EngineState) -> Position | None:
    """The first launch that both have made, and that differs."""
    for step in (one.step - 1, one.step):
        start, ours = one.known(step)
        other_start, theirs = other.known(step)
        first = max(start, other_start)
        ours, theirs = ours[first - start :], theirs[first - other_start :]
        length = min(len(ours), len(theirs))
        if ours[:length] == theirs[:length]:  # fast: nearly always they are equal
            continue
        for index in range(length):
            if ours[index] != theirs[index]:
                return step, first + index
    return None


def engine_keys(states: States, name: str) -> list[EngineKey]:
    """The engines over a set of ranks that any rank has, or had."""
    numbers = {
        one.numbers[name] for s in states.values() for one in s.engines if name in one.numbers
    }
    return [(name, number) for number in sorted(numbers)]


class Proof(NamedTuple):
    """A proof that ranks can never go on."""

    # Of the error.
    text: str
    # False if it rests on states that may have passed since they were published.
    stays: bool


def proof(states: States, name: str) -> Proof | None:
    """The proof that ranks of the set `name` can never go on; None without one."""
    for key in engine_keys(states, name):
        text = _differs(states, key) or _is_gone(states, key)
        if text is not None:
            return Proof(text, stays=True)
        text = _in_a_circle(states, key)
        if text is not None:
            return Proof(text, stays=False)
    return None


def _with(states: States, key: EngineKey) -> dict[int, tuple[RankState, EngineState]]:
    found = {}
    for rank, state in states.items():
        engine = state.engine(key)
        if engine is not None:
            found[rank] = state, engine
    return found


def _differs(states: States, key: EngineKey) -> str | None:
    members = _with(states, key)
    if not members:
        return None
    # If all agree with the one that has launched most, all agree.
    first = max(members, key=lambda rank: (members[rank][1].position, -rank))
    most = members[first][1]
    places = {}
    for rank, (_, engine) in members.items():
        place = first_difference(most, engine)
        if place is not None:
            places[rank] = place
    if not places:
        return None
    place = min(places.values())
    texts: dict[str, list[int]] = {}
    for rank, (_, engine) in members.items():
        text = engine.text_at(place)
        if text is not None:
            texts.setdefault(text, []).append(rank)
    return _text(
        _both(members, texts, place[0]),
        f"The launches differ since launch {place[1] + 1} of step {place[0] + 1}:",
        *(f"  - {ranks_in_words(ranks)}: {in_words(text)}" for text, ranks in texts.items()),
        *_calls_that_differ(members),
    )


def _calls_that_differ(members: Mapping[int, tuple[RankState, EngineState]]) -> list[str]:
    """A line for each number of calls of units that not all ranks have called equally often."""
    found: dict[tuple[str, int], list[int]] = {}
    for unit in dict.fromkeys(unit for _, engine in members.values() for unit in engine.calls):
        calls = {rank: engine.calls.get(unit, 0) for rank, (_, engine) in members.items()}
        if len(set(calls.values())) > 1:
            for rank, number in calls.items():
                found.setdefault((unit, number), []).append(rank)
    lines = []
    for (unit, number), ranks in found.items():
        often = {0: "no call", 1: "one call"}.get(number, f"{number} calls")
        lines.append(f"  - {ranks_in_words(ranks)}: {often} of `{unit}` in the last forward")
    return lines[:MOST_NAMED]


def _both(
    members: Mapping[int, tuple[RankState, EngineState]],
    texts: Mapping[str, Sequence[int]],
    step: int,
) -> str:
    """The first sentence: two ranks whose launches differ, and where each of them is."""
    (text, ranks), (other_text, others) = sorted(texts.items(), key=lambda item: item[1][0])[:2]
    waits = "has launched" if members[ranks[0]][0].runs_ahead else "waits for"
    _, engine = members[others[0]]
    lacks = ""
    if text not in (END, *engine.known(step)[1]):
        lacks = f"has not yet {_use(text)} in this step and "
    return (
        f"rank {ranks[0]} {waits} {in_words(text)}; "
        f"rank {others[0]} {lacks}{waits} {in_words(other_text)}"
    )


def _use(launch: str) -> str:
    """The use of the unit that a launch belongs to, behind "has"."""
    words = in_words(launch)
    if launch.startswith("weights of "):
        return f"called {words[words.index('`') :]}"
    return f"launched {words}"


def _is_gone(states: States, key: EngineKey) -> str | None:
    members = _with(states, key)
    for rank, (state, engine) in members.items():
        if not state.ended and engine.exists:
            continue
        for other, (waiting, _) in members.items():
            needs = None if waiting.ended else waiting.needs(key, state)
            if needs is not None:
                how = f"has ended ({state.ended})" if state.ended else "has deleted its model"
                return _text(
                    f"{_waits(other, waiting, key, needs)}; rank {rank} {how}{_last(engine)}"
                )
    return None


def _in_a_circle(states: States, key: EngineKey) -> str | None:
    members = _with(states, key)
    behind = sorted(members, key=lambda rank: members[rank][1].position)[:LOOKED_AT]
    for rank in behind:
        state, _ = members[rank]
        for other, (waiting, _) in members.items():
            needs = waiting.needs(key, state)
            if other == rank or needs is None or waiting.ended or state.ended:
                continue
            why = _waits_back(states, key, state, waiting)
            if why:
                return _text(f"{_waits(other, waiting, key, needs)}; rank {rank} {why}")
    return None


def _waits_back(states: States, key: EngineKey, state: RankState, waiting: RankState) -> str:
    """The reason why `state` waits for the rank `waiting`; "" if it does not, or may not."""
    rank = waiting.rank
    if state.waits_in is not None:
        numbers = state.engines[state.waits_in].numbers
        for other in numbers.items():
            if other != key and state.needs(other, waiting) is not None:
                return f"waits for {state.waits_for} of another model{_at(state)}"
    if rank not in state.members or waiting.collective:
        return ""
    # A third rank that is late may be all that the collective waits for.
    for member in {*state.members, *(r for r, s in states.items() if s.engine(key))}:
        other_state = states.get(member)
        if other_state is None or not _is_stuck(other_state, key, state):
            return ""
    return f"waits in {state.collective}{_at(state)}, which rank {rank} has not called"


def _is_stuck(one: RankState, key: EngineKey, behind: RankState) -> bool:
    if one.ended:
        return False
    waits = one.waits_in is not None or one.needs(key, behind) is not None
    return bool(one.collective) or waits


def _waits(rank: int, state: RankState, key: EngineKey, needs: Position) -> str:
    engine = state.engine(key)
    text = engine.text_at(needs) if engine is not None else None
    return f"rank {rank} waits for {in_words(text)} (step {needs[0] + 1}){_at(state)}"


def _at(state: RankState) -> str:
    return f", {state.place}" if state.place else ""


def _last(engine: EngineState) -> str:
    """The last launch, as the end of a sentence."""
    text = engine.launches[-1] if engine.launches else END if engine.step else None
    if text is None:
        return " before its first step"
    return (
        f"; its last launch was {in_words(text)}" if text != END else f" behind step {engine.step}"
    )


def _text(first: str, *more: str) -> str:
    return "\n".join(["ranks wait for each other and can never go on: " + first, *more, REMEDY])


def report(states: States, name: str, members: Sequence[int], me: int) -> str:
    """One line about the ranks that are late for the rank `me`; "" if none is known to be."""
    mine = states[me]
    late = []
    for key in engine_keys({me: mine}, name):
        for rank in members:
            state = states.get(rank)
            if rank == me or (state is not None and mine.needs(key, state) is None):
                continue
            if state is None:
                late.append(
                    f"rank {rank} gives no sign: its process is stopped, has ended, or is at work"
                )
            else:
                engine = state.engine(key)
                last = _last(engine) if engine is not None else ""
                late.append(
                    f"rank {rank} has launched nothing for {state.still_s:.0f} s{_at(state)}{last}"
                )
    if not late:
        return ""
    waits = mine.waits_for or "the others"
    more = f"; {len(late) - MOST_NAMED} more" if len(late) > MOST_NAMED else ""
    return (
        f"rank {me} has waited {mine.still_s:.0f} s for {waits}: "
        f"{'; '.join(late[:MOST_NAMED])}{more}"
    )
