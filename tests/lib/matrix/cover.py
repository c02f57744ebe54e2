"""Pairwise covering arrays under constraints: every pair of values that a cell can have is in one.
Of chosen dimensions, so is every triple of values.

A cell is completed by backtracking, with each rule looked at as soon as all that it reads is there.
A cell that is added takes missing pairs in a random order, each if the cell can be completed with
it. A seed makes that the same every time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product

from .table import Cell, Rule, Value

Pair = tuple[str, Value, str, Value]
"""Dimension and value, twice; the dimensions in the order of the table."""

Triple = tuple[tuple[str, Value], ...]
"""Dimension and value, three times; the dimensions in the order of the space's `triples`."""


@dataclass(frozen=True)
class Space:
    """All cells of some dimensions, with some of them fixed, that break no rule. triples: the
    dimensions and values of which every triple is wanted."""

    dimensions: Mapping[str, tuple[Value, ...]]
    rules: Sequence[Rule]
    fixed: Mapping[str, Value]
    triples: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    @cached_property
    def free(self) -> list[str]:
        """Names of the dimensions that are not fixed."""
        return [name for name in self.dimensions if name not in self.fixed]

    @cached_property
    def values(self) -> dict[str, tuple[Value, ...]]:
        """Of each dimension, those that the fixed ones leave."""
        found = {}
        for name, values in self.dimensions.items():
            found[name] = (self.fixed[name],) if name in self.fixed else values
        return found

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
        if isinstance(found, set):
            return None
        return {name: found[name] for name in self.dimensions}

    def _extend(self, cell: dict[str, Value], names: list[str]) -> dict[str, Value] | set[str]:
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
            if broken:
                found = set(broken.reads)
            else:
                found = self._extend(cell, others)
            del cell[name]
            if isinstance(found, dict) or name not in found:
                return found
            blamed |= found - {name}
        return blamed

    @cached_property
    def all_pairs(self) -> list[Pair]:
        """Every pair of values of two dimensions that are not fixed, possible or not."""
        found = []
        for a, b in combinations(self.free, 2):
            for x, y in product(self.values[a], self.values[b]):
                found.append((a, x, b, y))
        return found

    @cached_property
    def possible_pairs(self) -> list[Pair]:
        return [p for p in self.all_pairs if self.complete({p[0]: p[1], p[2]: p[3]}) is not None]

    @cached_property
    def possible_triples(self) -> list[Triple]:
        found = []
        for names in combinations(self.triples, 3):
            for values in product(*(self.triples[name] for name in names)):
                triple = tuple(zip(names, values, strict=True))
                if self.complete(dict(triple)) is not None:
                    found.append(triple)
        return found


def covered(cells: Iterable[Cell], space: Space) -> set[Pair]:
    """The pairs that occur in some cells."""
    return {(a, cell[a], b, cell[b]) for cell in cells for a, b in combinations(space.free, 2)}


def covered_triples(cells: Iterable[Cell], space: Space) -> set[Triple]:
    """The triples of the space that occur in some cells."""
    found = set()
    for cell in cells:
        for names in combinations(space.triples, 3):
            found.add(tuple((name, cell[name]) for name in names))
    return found & set(space.possible_triples)


def covering_array(space: Space, begin: Iterable[Cell] = ()) -> list[dict[str, Value]]:
    """The cells of `begin` that are possible, and more until every possible pair occurs, and every
    triple that is wanted; the same for the same arguments."""
    rows = [row for cell in begin if (row := space.complete(cell)) is not None]
    draw = random.Random(0)
    while missing := set(space.possible_pairs) - covered(rows, space):
        pairs = [((a, x), (b, y)) for a, x, b, y in sorted(missing, key=repr)]
        rows.append(_row_with(space, draw.sample(pairs, len(pairs))))
    while left := set(space.possible_triples) - covered_triples(rows, space):
        triples = sorted(left, key=repr)
        rows.append(_row_with(space, draw.sample(triples, len(triples))))
    return rows


def _row_with(space: Space, wanted: Iterable[Triple]) -> dict[str, Value]:
    """A possible cell with as many of `wanted` as can be had one after the other."""
    row: dict[str, Value] = {}
    for one in wanted:
        grown = {**row, **dict(one)}
        if row.items() <= grown.items() and space.complete(grown) is not None:
            row = grown
    found = space.complete(row)
    assert found is not None
    return found
