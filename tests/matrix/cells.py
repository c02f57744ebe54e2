"""The covering arrays: made from the table, and kept in `cells.json`, a list of names for each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from .cover import Space, covering_array
from .table import ARRAYS, DIMENSIONS, RULES, Value, cell_named, name_of

FILE = Path(__file__).parent / "cells.json"
BEGINS_WITH = {"gpu": "gpu_dp"}
"""Array -> the one whose cells are its first."""

Cells = list[dict[str, Value]]


def space(array: str) -> Space:
    return Space(DIMENSIONS, RULES, ARRAYS[array])


def computed() -> dict[str, Cells]:
    found: dict[str, Cells] = {}
    for array in ARRAYS:
        found[array] = covering_array(space(array), found.get(BEGINS_WITH.get(array, ""), []))
    return found


def write(arrays: dict[str, Cells]) -> None:
    names = {array: [name_of(cell) for cell in cells] for array, cells in arrays.items()}
    FILE.write_text(json.dumps(names, indent=1) + "\n")


def cached(array: str) -> Cells:
    return [cell_named(name) for name in json.loads(FILE.read_text())[array]]


def cells_with(words: Iterable[str], array: str) -> list[str]:
    """Names of the cells of an array that have all these words."""
    names = json.loads(FILE.read_text())[array]
    return [name for name in names if all(word in name for word in words)]
