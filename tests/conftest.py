from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="also run the tests that are marked `full`"
    )
    parser.addoption(
        "--again", action="store_true", help="leave out the tests that are marked `once`"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `full` are left out unless asked for with --full or -m; those marked `once` are
    where they have run with another megatron-core already."""
    marks = ["once"] if config.getoption("--again") else []
    if not (config.getoption("--full") or config.getoption("-m")):
        marks.append("full")
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
