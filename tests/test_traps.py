"""docs/traps*.md name tests that exist, and have a row for every kind of mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.again import AGAIN, ONCE, is_again

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted((ROOT / "docs").glob("traps*.md"))
KINDS = {"G": 18, "A": 12, "M": 24, "E": 11, "T": 8, "H": 7, "I": 11, "C": 44, "F": 7, "D": 16,
         "L": 16, "R": 10, "X": 11, "S": 14, "V": 6, "Q": 20, "O": 13, "W": 13,
         "U": 11}  # fmt: skip
"""How many kinds of mistake there are under each letter."""


def rows() -> list[list[str]]:
    """The cells of each row."""
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    lines = [line for line in text.splitlines() if re.match(r"\| [A-Z]\d", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_kind_has_one_row() -> None:
    found = [kind for row in rows() for kind in row[0].split(", ")]
    expected = [f"{letter}{n}" for letter, count in KINDS.items() for n in range(1, count + 1)]
    assert sorted(found) == sorted(expected)


def exists(name: str) -> bool:
    path, _, test = name.partition("::")
    file = ROOT / path
    return file.is_file() and bool(re.search(rf"^(def {test}\(|{test} = )", file.read_text(), re.M))


@pytest.mark.parametrize("name", (*AGAIN, *ONCE))
def test_what_runs_with_another_release_exists(name: str) -> None:
    """Where a file or test is renamed, its row of tests/again.py is, too."""
    path, _, test = f"tests/{name}".partition("::")
    assert exists(f"{path}::{test.partition('[')[0]}") if test else (ROOT / path).exists()


def test_what_runs_with_another_release_is_what_is_named_and_what_was_skipped() -> None:
    for test in ("adapter/test_options.py", AGAIN[-1]):
        assert is_again(f"tests/{test}::test_x")
    assert not is_again("tests/adapters/test_options.py::test_x")
    assert not is_again(f"tests/{ONCE[0]}::test_x")
    skipped = ["tests/cli/test_a.py", "tests/cli/test_b.py::test_x[1]"]
    assert is_again("tests/cli/test_a.py::test_x[0]", skipped) and is_again(skipped[1], skipped)
    assert not is_again("tests/cli/test_b.py::test_x[2]", skipped)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_row_names_a_test_that_exists_or_says_why_there_is_none(row: list[str]) -> None:
    kinds, mistake, here = row
    named = re.findall(r"`(tests/[^`]+)`", here)
    assert mistake and (named or "cannot arise" in here or "see " in here), kinds
    for name in named:
        assert exists(name), f"{kinds}: {name} does not exist"


def test_a_name_that_does_not_exist_is_found() -> None:
    assert exists("tests/test_traps.py::test_every_kind_has_one_row")
    assert not exists("tests/test_traps.py::test_every_kind")
    assert not exists("tests/test_trap.py::test_every_kind_has_one_row")
