"""The pytest plugin installs before and after collection, and says where the wrapper is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = """
from megatron.core.distributed import FullyShardedDataParallel
from megatron.core.datasets.utils import compile_helpers

def test_names():
    assert FullyShardedDataParallel.__module__.startswith("megatron_fsdp_adapter")
    assert "megatron_fsdp_adapter" in compile_helpers.__module__, "a wheel has nothing to build"
"""


def test_a_foreign_test_runs_with_the_wrapper(tmp_path: Path) -> None:
    (tmp_path / "test_foreign.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-s", "-q",
         "-p", "megatron_fsdp_adapter.launch.pytest_plugin", "test_foreign.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FullyShardedDataParallel is ours in megatron.core" in done.stdout
