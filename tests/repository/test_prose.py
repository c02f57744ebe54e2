"""Prose of docs, docstrings, comments and messages: short lines, plain words."""

from __future__ import annotations

import math
import re

import pytest

from tests.lib.pages import PAGES, ROOT
from tests.lib.texts import texts_of

CHECKS = ()  # reads pages and sources

SOURCES = sorted((*ROOT.glob("megatron_fsdp_adapter/**/*.py"), *ROOT.glob("scripts/**/*.py")))
MAX_LINE = 250
MAX_WORDS = 2_500
MAX_WORDS_OF_USERS = 40_000
"""Of all pages for users."""
LOOKED_UP = {
    "docs/options.md",
    "docs/support.md",
    "docs/troubleshooting.md",
    "docs/contributing/features.md",
    "docs/contributing/traps.md",
}
"""Pages of tables, which are looked up and not read: they may be longer."""

IMPERSONAL = r"who|whom|whoever|nobody|somebody|someone|anybody|told|said"
ODD = r"mended|anew|matrix products?"
BRITISH = (
    r"\w*(?:haviour|colour|favour|honour|neighbour)\w*|centre[ds]?|catalogues?|whilst|judgement"
    r"|(?:mod|lab|canc|trav)ell(?:ed|ing)"
    r"|\w*(?:normal|initial|quant|serial|optim|organ|recogn|minim|maxim|material|parallel|real|"
    r"special|synchron|summar|general)is(?:e[ds]?|ing|ations?)"
)
BANNED = re.compile(rf"\b(?:{IMPERSONAL}|{ODD}|{BRITISH})\b", re.IGNORECASE)

FIRST = re.compile(r"(?:What|Whether|Who|How|Which|Where|Than|Those|That|The same|Of|By|See)\b")
"""Beginnings of a docstring that leave open what its function returns or does."""
REMEDY = re.compile(
    r"; (?:use|set|name|pass|call|give|make|load|put|run|keep|switch|leave|install|choose|add|"
    r"write|take|freeze|wrap|build)\b"
)
"""A remedy that is no sentence of its own."""
SENTENCES = re.compile(r"[a-z0-9)`}'\"]\. [A-Z]")


def words_of(text: str) -> list[str]:
    """Banned words, but in code."""
    return BANNED.findall(re.sub(r"`[^`]*`", "", text))


def without_code(text: str) -> str:
    """The text with its fenced blocks blanked, so that lines keep their numbers."""
    return re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)


def page_problems(text: str, max_words: float = MAX_WORDS) -> list[str]:
    """Long lines outside of tables, and banned words, with line numbers; a page that is too long to
    be read at once."""
    words = len(text.split())
    if words > max_words:
        found = [f"{words} words: split the page"]
    else:
        found = []
    for number, line in enumerate(without_code(text).splitlines(), 1):
        if len(line) > MAX_LINE and not line.lstrip().startswith("|"):
            found.append(f"{number}: {len(line)} characters")
        if banned := words_of(line):
            found.append(f"{number}: {banned}")
    return found


def source_problems(source: str) -> list[str]:
    """Banned words, beginnings of docstrings, and messages that are not one or two sentences."""
    found = []
    for line, kind, text in texts_of(source):
        plain = re.sub(r"`[^`]*`", "`", text)
        if words := words_of(text):
            found.append(f"{line}: {words}")
        if kind == "docstring" and (first := FIRST.match(text)):
            found.append(f"{line}: begins with {first[0]}")
        if kind == "message" and (REMEDY.search(plain) or len(SENTENCES.findall(plain)) > 1):
            found.append(f"{line}: not one or two sentences: {text}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_prose_of_a_page_is_short_and_plain(page: str) -> None:
    max_words = math.inf if page in LOOKED_UP else MAX_WORDS
    assert page_problems((ROOT / page).read_text(), max_words) == []


def test_pages_for_users_are_short_together_and_name_no_tests() -> None:
    texts = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
    words = {name: len(text.split()) for name, text in texts.items()}
    excess = sum(words.values()) - MAX_WORDS_OF_USERS
    longest = sorted(words, key=words.__getitem__, reverse=True)[:5]
    assert excess <= 0, f"shorten pages by {excess} words; the longest are {longest}"
    assert {name for name, text in texts.items() if "tests/" in text} == set()
    no_end = {name for name, text in texts.items() if "\n## What next\n" not in text}
    assert no_end <= {"api.md", "index.md"}


def test_docstrings_comments_and_messages_are_plain() -> None:
    found = {}
    for path in SOURCES:
        if problems := source_problems(path.read_text()):
            found[str(path.relative_to(ROOT))] = problems
    in_tests = []
    for path in (ROOT / "tests").rglob("*.py"):
        for line, kind, text in texts_of(path.read_text()):
            if kind != "message" and (words := words_of(text)):
                in_tests.append(f"{path.relative_to(ROOT)}:{line}: {words}")
    assert found == {}
    assert in_tests == []


def test_what_is_not_plain_is_found() -> None:
    long = "x" * (MAX_LINE + 1)
    page = f"# A\n```\n{long}\nnobody\n```\n| {long} |\n`said`\n{long}\nNobody is told.\n"
    assert page_problems(page) == [f"8: {MAX_LINE + 1} characters", "9: ['Nobody', 'told']"]
    assert page_problems("| a " * 1_251) == ["2502 words: split the page"]
    source = (
        '"""What is there."""\n# as said\n'
        'raise ValueError(f"{x}: must be one; use two")\n'
        'raise ValueError("One is so. Two is so. Three is so")\n'
        'print("quantised behaviour, labelled")\n'
        'x = "a `nobody; use it` b c. Do so"\n'
    )
    assert [problem.split(": ", 1)[0] for problem in source_problems(source)] == list("13452")
    assert words_of("modelled neighbours anew, promise, raised") == [
        "modelled",
        "neighbours",
        "anew",
    ]
