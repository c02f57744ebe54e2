"""docs/troubleshooting.md quotes messages that the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.lib.pages import ROOT
from tests.lib.texts import texts_of

CHECKS = ()  # reads the page and sources

PAGE = ROOT / "docs" / "troubleshooting.md"
HEAD = "| message | cause | what to do |"
"""Head of the tables with messages of this package; others have messages of torch."""


def quoted(page: str) -> list[str]:
    """The messages in the first cells of the tables, of which a cell may have several."""
    found = []
    for table in page.split(HEAD)[1:]:
        rows = table.partition("\n\n")[0].splitlines()[2:]
        for row in rows:
            found += re.findall(r"`([^`]+)`", row.split(" | ")[0])
    return found


def sources() -> Iterator[str]:
    """Every string of the package, with {} where values are put in, on one line."""
    for path in (ROOT / "megatron_fsdp_adapter").rglob("*.py"):
        for _, kind, text in texts_of(path.read_text()):
            if kind == "message":
                yield " ".join(text.split())


def is_in(message: str, text: str) -> bool:
    """True if the text has the parts of a message, of which `...` stands for the rest, in order."""
    parts = [part.strip() for part in message.split("...")]
    return re.search(".*".join(map(re.escape, parts)), text.replace("{}", "")) is not None


def test_messages_that_are_quoted_stand_in_the_code() -> None:
    messages = quoted(PAGE.read_text())
    texts = list(sources())
    assert len(messages) > 50
    missing = [message for message in messages if not any(is_in(message, t) for t in texts)]
    assert missing == []


def test_what_does_not_stand_there_is_found() -> None:
    page = f"{HEAD}\n|---|---|---|\n| `a ... b c`; `d` | e | `f` |\n\n`g`\n"
    assert quoted(page) == ["a ... b c", "d"]
    assert is_in("a ... b c", "x a {}: b c.")
    assert not is_in("a ... b c", "x b c a")
