"""Pairwise covering arrays under constraints: every pair of values that a cell can have is in one.

A cell is completed by backtracking, with each rule looked at as soon as all that it reads is there.
An array is made greedily (as AETG does): each row is the best of several, each of which begins with
a pair that is missing and takes, dimension by dimension, the value that adds most missing pairs and
leaves a cell possible. A seed makes it the same every time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

from .table import Cell, Rule, Value

Pair = tuple[str, Value, str, Value]
"""Dimension and value, twice; the dimensions in the order of the table."""


@dataclass(frozen=True)
class Space:
    """All cells of some dimensions, with some of them fixed, that break no rule."""

    dimensions: Mapping[str, tuple[Value, ...]]
    rules: Sequence[Rule]
    fixed: Mapping[str, Value]

    @cached_property
    def values(self) -> dict[str, tuple[Value, ...]]:
        """Of each dimension, those that the fixed ones leave."""
        return {
            name: (self.fixed[name],) if name in self.fixed else values
            for name, values in self.dimensions.items()
        }

    @cached_property
    def _rules_of(self) -> dict[str, list[Rule]]:
        return {name: [r for r in self.rules if name in r.reads] for name in self.dimensions}

    @cached_property
    def _order(self) -> list[str]:
        """Those that most rules read come first: a contradiction is found early."""
        return sorted(self.dimensions, key=lambda name: -len(self._rules_of[name]))

    def complete(self, partial: Cell) -> dict[str, Value] | None:
        """A possible cell that has the values of `partial`, with the first values of dimensions
        elsewhere where they can be had; None if there is none."""
        cell: dict[str, Value] = dict(self.fixed)
        for name, value in partial.items():
            if cell.setdefault(name, value) != value:
                return None
        if any(rule.breaks(cell) for rule in self.rules):
            return None
        found = self._extend(cell, [name for name in self._order if name not in cell])
        return None if isinstance(found, set) else {name: found[name] for name in self.dimensions}

    def _extend(
        self, cell: dict[str, Value], names: list[str]
    ) -> dict[str, Value] | set[str]:
        """The cell with all of `names`, or, if there is none, dimensions that it has already and
        whose values alone exclude it: where the last one is not among them, its other values need
        not be tried."""
        if not names:
            return dict(cell)
        name, *others = names
        blamed: set[str] = set()
        for value in self.values[name]:
            cell[name] = value
            broken = next((rule for rule in self._rules_of[name] if rule.breaks(cell)), None)
            found = set(broken.reads) if broken else self._extend(cell, others)
            del cell[name]
            if isinstance(found, dict) or name not in found:
                return found
            blamed |= found - {name}
        return blamed

    @cached_property
    def all_pairs(self) -> list[Pair]:
        """Every pair of values of two dimensions that are not fixed, possible or not."""
        free = [name for name in self.dimensions if name not in self.fixed]
        return [
            (a, x, b, y)
            for a, b in combinations(free, 2)
            for x, y in product(self.values[a], self.values[b])
        ]

    @cached_property
    def possible_pairs(self) -> list[Pair]:
        return [p for p in self.all_pairs if self.complete({p[0]: p[1], p[2]: p[3]}) is not None]


def pairs_of(cell: Cell, names: Iterable[str]) -> set[Pair]:
    """The pairs of a cell, of the dimensions `names`; those that a partial cell lacks are left
    out."""
    there = [name for name in names if name in cell]
    return {(a, cell[a], b, cell[b]) for a, b in combinations(there, 2)}


def covered(cells: Iterable[Cell], space: Space) -> set[Pair]:
    free = [name for name in space.dimensions if name not in space.fixed]
    return set[Pair]().union(*(pairs_of(cell, free) for cell in cells))


def _grown(space: Space, start: Pair, missing: set[Pair], draw: random.Random) -> dict[str, Value]:
    """A possible cell with `start` in it and many pairs of `missing`."""
    cell: dict[str, Value] = {**space.fixed, start[0]: start[1], start[2]: start[3]}
    names = [name for name in space.dimensions if name not in cell]
    draw.shuffle(names)
    position = {name: at for at, name in enumerate(space.dimensions)}

    def gain(name: str, value: Value) -> int:
        return sum(
            ((other, had, name, value) if position[other] < position[name]
             else (name, value, other, had)) in missing
            for other, had in cell.items()
        )  # fmt: skip

    for name in names:
        values = list(space.values[name])
        draw.shuffle(values)
        values.sort(key=lambda value: -gain(name, value))
        cell[name] = next(v for v in values if space.complete({**cell, name: v}) is not None)
    return {name: cell[name] for name in space.dimensions}


def covering_array(
    space: Space, begin: Sequence[dict[str, Value]] = (), seed: int = 15, tries: int = 12
) -> list[dict[str, Value]]:
    """Cells in which every possible pair occurs, those of `begin` first; the same for the same
    arguments."""
    draw = random.Random(seed)
    free = [name for name in space.dimensions if name not in space.fixed]
    missing = set(space.possible_pairs) - covered(begin, space)
    rows: list[dict[str, Value]] = []
    while missing:
        waiting = sorted(missing, key=repr)
        tried = [_grown(space, draw.choice(waiting), missing, draw) for _ in range(tries)]
        best = max(tried, key=lambda row: len(pairs_of(row, free) & missing))
        missing -= pairs_of(best, free)
        rows.append(best)
    return [*begin, *_without_spare_rows(rows, begin, space)]


def _without_spare_rows(
    rows: list[dict[str, Value]], begin: Sequence[dict[str, Value]], space: Space
) -> list[dict[str, Value]]:
    """The rows less those whose pairs all occur in others."""
    kept = list(rows)
    for row in reversed(rows):
        others = [other for other in kept if other is not row]
        if covered([*begin, *others], space) >= covered([row], space):
            kept = others
    return kept
