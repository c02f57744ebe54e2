"""The code blocks of README.md and docs/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCUMENTS = (
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)


@dataclass(frozen=True)
class Block:
    """A fenced block. marks: the words behind its language."""

    document: str
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        return f"{self.document}:{self.line}"

    def runs(self, kinds: frozenset[str]) -> bool:
        """Whether each of its marks, or having none, is of `kinds`."""
        return set(self.marks or ("",)) <= kinds


def blocks_of(document: str, text: str) -> list[Block]:
    """The blocks of a document that have a language."""
    fences = list(re.finditer(r"^```(.*)\n((?:(?!```).*\n)*)```$", text, re.M))
    assert text.count("\n```") == 2 * len(fences), f"{document}: a block does not end"
    found: list[Block] = []
    for fence in fences:
        language, *marks = fence[1].split() or [""]
        if language:
            line = text.count("\n", 0, fence.start()) + 1
            found.append(Block(document, line, language, tuple(marks), fence[2]))
    return found


BLOCKS = [b for name in DOCUMENTS for b in blocks_of(name, (ROOT / name).read_text())]
