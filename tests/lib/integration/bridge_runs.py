"""Whether Megatron-Bridge is there, and the script that trains its recipes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.lib.integration.lm_runs import ROOT

EXAMPLE = ROOT / "scripts" / "pretrain_bridge.py"


def need_bridge(needed: str = "") -> None:
    """Skips where Megatron-Bridge cannot be used. needed: a statement that it has to allow."""
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("megatron-bridge is not installed")
    probe = f"import tests.lib.integration.bridge_on_cpu as b; b.prepare_bridge(); {needed}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", probe], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"megatron-bridge: {done.stderr.strip().rpartition(chr(10))[2]}")
