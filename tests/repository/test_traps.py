"""docs/contributing/traps*.md have a row for every kind of mistake; all that pages name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lib.again import AGAIN, is_again
from tests.lib.pages import PAGES

CHECKS = ()  # reads pages

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted((ROOT / "docs" / "contributing").glob("traps*.md"))
KINDS = {"G": 18, "A": 12, "M": 26, "E": 11, "T": 8, "H": 7, "I": 11, "C": 45, "F": 7, "D": 16,
         "L": 17, "R": 10, "X": 11, "S": 14, "V": 6, "Q": 20, "O": 13, "W": 13,
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


NAMED = re.compile(r"(?<![\w/-])(?:tests|scripts|configs|docs)/[\w/.-]*\w(?:::\w+)?(?![\w*])")
ELSEWHERE = {"tests/fsdp/test_fsdp.py"}
"""A test of accelerate's."""


def exists(name: str) -> bool:
    path, _, test = name.partition("::")
    file = ROOT / path
    return file.exists() and bool(
        not test or re.search(rf"^(def {test}\(|{test} = )", file.read_text(), re.M)
    )


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_that_a_page_names_exist(page: str) -> None:
    named = set(NAMED.findall((ROOT / page).read_text()))
    assert [name for name in named - ELSEWHERE if not exists(name)] == []


@pytest.mark.parametrize("name", AGAIN)
def test_what_runs_with_another_release_exists(name: str) -> None:
    """Where a file or test is renamed, its row of tests/lib/again.py is, too."""
    assert exists(f"tests/{name}".partition("[")[0])


def test_what_runs_with_another_release_is_what_is_named_and_what_was_skipped() -> None:
    assert is_again("tests/megatron/options/test_options.py::test_x")
    assert not is_again("tests/megatron/layers/test_layer_graphs.py::test_x")
    skipped = ["tests/cli/test_a.py", "tests/cli/test_b.py::test_x[1]"]
    assert is_again("tests/cli/test_a.py::test_x[0]", skipped)
    assert is_again(skipped[1], skipped)
    assert not is_again("tests/cli/test_b.py::test_x[2]", skipped)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_row_names_a_test_or_says_why_there_is_none(row: list[str]) -> None:
    _, mistake, here = row
    assert mistake
    assert "`tests/" in here or "cannot arise" in here or "see " in here


def test_a_name_that_does_not_exist_is_found() -> None:
    assert not exists("tests/repository/test_traps.py::test_every_kind")
    assert not exists("tests/test_trap.py::test_every_kind_has_one_row")
