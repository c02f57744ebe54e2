"""The covering arrays, kept in `cells.json`, a list of names for each.

`python -m tests.lib.matrix.cells`, after a change of the table, leaves out what is no longer
possible, and adds cells for pairs, and chosen triples, that are in none.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path

from .cover import Space, covering_array
from .table import ARRAYS, DIMENSIONS, RULES, TRIPLES, Value, cell_named, name_of

FILE = Path(__file__).parent / "cells.json"
BEGINS_WITH = {"gpu": "gpu_dp"}
"""Array -> the one whose cells are its first."""

Cells = list[dict[str, Value]]


@functools.cache
def space(array: str) -> Space:
    return Space(DIMENSIONS, RULES, ARRAYS[array], TRIPLES.get(array, {}))


def computed() -> dict[str, list[str]]:
    """Names of the cells of each array: those of the file, as far as the table allows them, and
    what they lack."""
    found: dict[str, list[str]] = {}
    for array in ARRAYS:
        begin = dict.fromkeys([*found.get(BEGINS_WITH.get(array, ""), []), *names(array)])
        found[array] = [*map(name_of, covering_array(space(array), map(cell_named, begin)))]
    return found


def names(array: str) -> list[str]:
    """Those in the file."""
    return json.loads(FILE.read_text())[array]


def cached(array: str) -> Cells:
    return [cell_named(name) for name in names(array)]


def cells_with(words: Iterable[str], array: str) -> list[str]:
    """Names of the cells of an array that have all these words."""
    return [name for name in names(array) if all(word in name for word in words)]


if __name__ == "__main__":
    FILE.write_text(json.dumps(computed(), indent=1) + "\n")
