"""Hooks of mkdocs.yml, which change a page of docs/ for the site. A Git host shows it unchanged."""

from __future__ import annotations

import os.path
import re
import textwrap
from collections.abc import Iterator
from typing import Any

TITLES = {
    "bridge": "with Megatron-Bridge",
    "gpu": "on GPUs",
    "nodes": "on each node",
    "megatron-lm": "with a checkout of Megatron-LM",
    "sketch": "with your own model",
    "transformers": "with transformers",
}
"""Mark behind the language of a code block -> title of the block. Tests read the marks, too."""
FENCE = re.compile(r"^```(\w+)((?: [\w-]+)+)$", re.M)
TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->$", re.M | re.S)
TAB = re.compile(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", re.M | re.S)
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.S)
CODE = re.compile(r"(?<=<code>)[^<]+")
RELATIVE = re.compile(r"\[([^\]]+)\]\(([\w./-]+)((?:#[\w-]+)?)\)")
FOR_CONTRIBUTORS = "contributing/"
"""Folder of the pages that a search does not find."""


def titled(fence: re.Match[str]) -> str:
    """The first line of a code block, with titles in place of its marks."""
    language = fence[1]
    title = ", ".join(TITLES[mark] for mark in fence[2].split() if mark in TITLES)
    if title:
        return f'```{language} title="{title}"'
    return f"```{language}"


def tabbed(section: re.Match[str]) -> str:
    """A section as content tabs, one for each heading of the third level."""
    return TAB.sub(_tab, section[1])


def _tab(section: re.Match[str]) -> str:
    body = textwrap.indent(section[2], "    ")
    return f'=== "{section[1]}"\n{body}'


def nav_titles(nav: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """(file, title) of each page of mkdocs.yml's nav. A page of a section within a section has the
    inner one's name before its title."""
    for one in nav:
        for title, below in one.items():
            if isinstance(below, str):
                yield below, ": ".join((*above[1:], title))
            else:
                yield from nav_titles(below, (*above, title))


def on_page_markdown(markdown: str, page: Any, config: Any, **unused: Any) -> str:
    """The page as the site's Markdown.

    A link that is named as its file gets the page's title. A link to a file outside of docs/, which
    the site does not have, becomes its text. Pages for contributors are left out of the search."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    elif page.parent is None:  # a tab of one page, whose title is in the tabs already
        page.meta["hide"] = ["navigation"]
    source = page.file.src_uri
    if source.startswith(FOR_CONTRIBUTORS):
        page.meta["search"] = {"exclude": True}
    titles = dict(nav_titles(config["nav"]))

    def relative(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        file = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if file.startswith(".."):
            return text
        if text == os.path.basename(file):
            text = titles.get(file, text)
        return f"[{text}]({target}{anchor})"

    text = RELATIVE.sub(relative, markdown)
    text = FENCE.sub(titled, text)
    return TABS.sub(tabbed, text)


def breakable(cell: re.Match[str]) -> str:
    """A cell of a table, in which lines may break behind `_`, `/` and `::` of names, so that the
    table is narrower."""
    return CODE.sub(lambda code: re.sub(r"(_|/|::)(?=\w)", r"\1<wbr>", code[0]), cell[0])


def on_post_page(output: str, **unused: Any) -> str:
    """The page's HTML, with names in tables that may break."""
    return CELL.sub(breakable, output)
