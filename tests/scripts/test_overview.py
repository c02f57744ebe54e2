"""Numbers that readers compare: README's picture and table are of one measurement, and ratios in
tables follow from the times beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import overview as script
import pytest
import yaml

CHECKS = ()  # of scripts/overview.py

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TIME = re.compile(r"(?:ddp |ours:optim )?ms/step")
"""Titles of columns with times."""
Row = list[str]


def tables(text: str) -> Iterator[list[Row]]:
    """The tables of a page: cells of the header, then of each row."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        lines = [line.strip().strip("|").split("|") for line in table.splitlines()]
        if len(lines) > 2:
            rows = [lines[0], *lines[2:]]
            yield [[cell.strip() for cell in row] for row in rows]


def first_number(cell: str) -> float:
    """The first number of a cell, before its quartiles or extremes."""
    found = NUMBER.search(cell)
    assert found, cell
    return float(found[0])


def is_reference(name: str, kind: str) -> bool:
    """True for the row of DDP, or of the floor, behind the name of a run or a precision."""
    own = name.split(": ")[-1]
    if kind == "ddp":
        pattern = r"(?:ddp|DDP|Megatron's DDP)\b(?!,)"
    else:
        pattern = r"floor\b(?!-)"
    return re.match(pattern, own) is not None


def runs_of(rows: list[Row]) -> list[list[Row]]:
    """Rows by run: a row whose name begins with `RUN: ` begins another run, or precision."""
    runs: list[list[Row]] = [[]]
    for row in rows:
        if ": " in row[0]:
            runs.append([])
        runs[-1].append(row)
    return runs


def wrong_ratios(table: list[Row]) -> list[str]:
    """Rows whose `x ddp` or `x floor` is not the quotient of two times in the table: those of the
    row and of the reference in its run, or in the table if its run has none."""
    header, *rows = table
    times = [n for n, title in enumerate(header) if TIME.match(title)]
    wrong = []
    for column, title in enumerate(header):
        if not title.startswith("x ") or not times:
            continue
        kind = title.removeprefix("x ")
        for run in runs_of(rows):
            references = [row for row in (*run, *rows) if is_reference(row[0], kind)]
            for row in run:
                if not NUMBER.fullmatch(row[column]):
                    continue
                # The first of two columns with times is the reference's.
                if len(times) > 1:
                    reference = row
                else:
                    reference = references[0]
                quotient = first_number(row[times[-1]]) / first_number(reference[times[0]])
                digits = len(row[column].partition(".")[2])
                if f"{quotient:.{digits}f}" != row[column]:
                    wrong.append(f"{row[0]}: {row[column]} {title}, and not {quotient:.4f}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_ratios_follow_from_the_times_beside_them(page: Path) -> None:
    assert [wrong for table in tables(page.read_text()) for wrong in wrong_ratios(table)] == []


def test_a_wrong_ratio_is_found() -> None:
    page = "| | ms/step | x ddp |\n|---|---|---|\n| {} |\n| DDP | 98.7 | 1.000 |\n"
    right = "FSDP2 | 127.3 (126.2-129.3) | 1.290"
    wrong = "FSDP2 | 127.3 (126.2-129.3) | 1.281"
    assert wrong_ratios(next(tables(page.format(right)))) == []
    assert len(wrong_ratios(next(tables(page.format(wrong))))) == 1


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_a_page_has_the_numbers_of_the_picture(page: str) -> None:
    table = yaml.safe_load((ROOT / "docs" / "overview.yaml").read_text())
    text = (ROOT / page).read_text()
    assert f"commit {table['commit']}" in text
    header, floor, *rows = next(tables(text))
    assert header[1:] == ["ms/step", "x ddp", "x floor", "peak GiB"]
    assert floor[1] == str(table["floor"])
    found = [(name, time, memory) for name, time, _, _, memory in rows]
    assert found == [(row["name"], str(row["ms"]), str(row["gib"])) for row in table["rows"]]


def texts(picture: Path) -> list[str]:
    """All texts of an SVG, in order."""
    elements = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(element.itertext()) for element in elements]


def test_the_picture_is_drawn_from_the_table(tmp_path: Path) -> None:
    drawn = tmp_path / "overview.svg"
    assert script.main(["--out", str(drawn)]) == 0
    assert texts(drawn) == texts(ROOT / "docs" / "overview.svg")
    table = yaml.safe_load((ROOT / "docs" / "overview.yaml").read_text())
    assert {row["name"] for row in table["rows"]} <= set(texts(drawn))
