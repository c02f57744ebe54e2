"""Runs the tests of a framework on Megatron, unmodified, with this package's wrapper.

    torchrun --nproc_per_node 2 -m pytest -p megatron_fsdp_adapter.launch.pytest_plugin tests

Installs before the tests are collected, and again after, when everything that they import is
loaded; then prints where the wrapper is. A megatron-core from a wheel cannot build its dataset
helpers, which Megatron-Bridge asks of it whenever training starts, and has them built already; so
there that does nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from . import installation

_HELPERS = "megatron.core.datasets.utils"


def pytest_configure(config: Any) -> None:
    """Installs, before any test module is imported."""
    installation.install()
    if _has_built_helpers():
        utils = importlib.import_module(_HELPERS)
        installation.rebind_everywhere(utils.compile_helpers, _nothing_to_compile)


def pytest_collection_finish(session: Any) -> None:
    """Installs again: what test modules have imported may hold Megatron's own class. Prints, on
    the first rank, where the wrapper is."""
    installation.install()
    if int(os.environ.get("RANK", "0")) == 0:
        print()
        for name, holders in installation.places().items():
            print(f"megatron_fsdp_adapter: {name} is ours in {', '.join(holders)}")


def _has_built_helpers() -> bool:
    """Whether core's dataset helpers are there in binary form and nothing is to build them from."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return False
    found = importlib.util.find_spec(_HELPERS)
    return found is not None and not Path(str(found.origin)).with_name("Makefile").exists()


def _nothing_to_compile() -> None:
    """In the place of core's `compile_helpers`."""
