"""CONTRIBUTING.md leads to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

CHECKS = ()  # reads the page

ROOT = Path(__file__).resolve().parents[2]


def test_paths_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`([\w.]+/[\w./]*)`", text)
    missing = []
    for path in paths:
        if not (ROOT / path).exists() and not (ROOT / "megatron_fsdp_adapter" / path).exists():
            missing.append(path)
    assert len(paths) > 50
    assert missing == []
