"""verl, unmodified: its plugin entry builds sharded models, which give their memory to the engine
that generates, and send it what a step has changed.

Opt-in: see docs/contributing/test_runs.md.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.lib.integration.bridge_runs import need_bridge
from tests.lib.integration.lm_runs import run_worker

CHECKS = ("launch/verl_plugin.py", "megatron/frameworks/rl_frameworks.py")

pytestmark = pytest.mark.full

CASES = (
    "llama 1 1 1 optim_grads_params",
    "llama 1 1 1 optim_grads_params 2",
    "llama 1 1 1 optim",
    "qwen2 1 1 1 no_shard",
    "llama 2 1 1 optim_grads_params",
    "qwen2 2 1 1 no_shard",
    "qwen2 1 1 2 optim_grads_params",
    "moe 1 2 1 optim_grads_params",
    "moe 1 2 1 optim",
)


@pytest.mark.parametrize("case", CASES)
def test_verl_builds_moves_and_exports_sharded_models(tmp_path: Path, case: str) -> None:
    """A process of its own for each case: verl keeps mappings over a change of groups."""
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    need_bridge()
    assert run_worker("verl_worker.py", tmp_path, case).count("checked ") == 2
