"""Megatron-LM's unit test of its own FSDP wrapper, unmodified, with ours in its place, on gloo
ranks. On GPUs: scripts/peer_tests.sh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.parametrize(
    "test",
    [
        "test_fsdp_with_process_groups",
        "test_fsdp_with_hybrid_sharding",
        "test_compatible_with_nd_parallel and TP2 and not ETP2",
    ],
)
def test_the_peers_tests_pass_with_our_wrapper(
    megatron_lm: Path, tmp_path: Path, test: str
) -> None:
    """But for those that ask for 8 ranks."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "peer_tests.sh")],
        env={
            **os.environ, "MEGATRON_LM_PATH": str(megatron_lm), "OUT": str(tmp_path),
            "PYTHON": sys.executable, "PLUGIN": "peer_on_cpu", "WHO": "ours", "ONLY": test,
            "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
        },
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
