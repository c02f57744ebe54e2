"""The site of mkdocs.yml is built without a warning; what its pages have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatron_fsdp_adapter
from megatron_fsdp_adapter import checkpoint
from scripts.lib import pages

CHECKS = ()  # of the pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors and nav are checked by it, and docstrings beside signatures. A search finds
    the pages for users."""
    for name in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python"):
        pytest.importorskip(name)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fully_shard_optimizer" in (tmp_path / "api.html").read_text()
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert found == {f"{page.stem}.html" for page in DOCS.glob("*.md")}


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text()
    named = set(re.findall(r"^::: megatron_fsdp_adapter\.([\w.]+)$", text, re.M))
    public = {
        *megatron_fsdp_adapter.__all__,
        *(f"checkpoint.{name}" for name in checkpoint.__all__),
    }
    assert public <= named


def test_pages_for_contributors_are_left_out_of_the_search() -> None:
    file = SimpleNamespace(src_uri="memory.md")
    page = SimpleNamespace(is_homepage=False, parent="Guides", meta={}, file=file)
    config = {"nav": [{"Guides": [{"Memory": "memory.md"}]}]}
    text = "[memory.md](memory.md#a), [tests](../tests/a.py), [b](contributing/b.md)"
    expected = "[Memory](memory.md#a), tests, [b](contributing/b.md)"
    assert pages.on_page_markdown(text, page, config) == expected
    assert page.meta == {}
    page.file.src_uri = "contributing/design.md"
    text = "[memory.md](../memory.md#a), [tests](../../tests/a.py)"
    assert pages.on_page_markdown(text, page, config) == "[Memory](../memory.md#a), tests"
    assert page.meta == {"search": {"exclude": True}}


def anchors(text: str) -> set[str]:
    """The anchors that a Git host gives to a page's headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        found.add(plain.replace(" ", "-"))
    return found


def broken_links(page: Path) -> Iterator[str]:
    """The links of a page to files and headings that are not there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https:", "http:")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            yield f"{page.name}: {target}"


def test_links_hold_on_a_git_host(tmp_path: Path) -> None:
    """Those of README.md too, which is not on the site."""
    written = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    assert [link for page in written for link in broken_links(page)] == []
    page = tmp_path / "a.md"
    page.write_text("# A `b`, c\n[x](#a-b-c) [x](a.md#a-b-c) [x](a.md#b) [x](b.md) [x](https://c)")
    assert list(broken_links(page)) == ["a.md: a.md#b", "a.md: b.md"]
