from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import megatron.training.training
except ModuleNotFoundError as error:
    if error.name.startswith("megatron"):
        raise
    print("missing:", error.name)
"""


@pytest.fixture(scope="session", autouse=True)
def servers_end_with_the_tests() -> Iterator[None]:
    yield
    runs = sys.modules.get("tests.lib.integration.lm_runs")
    if runs is not None:
        runs.end_servers()


@pytest.fixture(scope="session")
def megatron_lm() -> Path:
    """The checkout, if there is one and what its training modules import is installed."""
    named = os.environ.get("MEGATRON_LM_PATH")
    if not named:
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout")
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, named], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if "missing:" in done.stdout:
        pytest.skip(f"Megatron-LM's training modules need a package, {done.stdout.strip()}")
    return Path(named)
