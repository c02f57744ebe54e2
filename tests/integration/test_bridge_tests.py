"""Megatron-Bridge's own tests of its FSDP path, unmodified, with this package's wrapper.

Opt-in: needs a checkout that MEGATRON_BRIDGE_PATH names (v0.6.0), beside the installed package. The
one that needs Transformer Engine is left to GPUs.

    MEGATRON_BRIDGE_PATH=... python -m pytest --full tests/integration/test_bridge_tests.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.integration.lm_runs import HARNESSES, ROOT
from tests.integration.test_bridge import need_bridge

pytestmark = pytest.mark.full
FILE = "tests/functional_tests/test_groups/megatron_fsdp/test_megatron_fsdp.py"


@pytest.mark.parametrize("name", ("test_fsdp_pretrain_basic", "test_fsdp_pretrain_save_resume"))
def test_of_megatron_bridge_passes(name: str) -> None:
    checkout = os.environ.get("MEGATRON_BRIDGE_PATH")
    if not checkout:
        pytest.skip("MEGATRON_BRIDGE_PATH names no Megatron-Bridge checkout")
    need_bridge("b.importlib.import_module('megatron.training')")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node", "2",
         "--standalone", "-m", "pytest", "-p", "bridge_tests_on_cpu",
         "-p", "no:cacheprovider", "-s",
         f"{FILE}::TestMegatronFSDP::{name}"],
        cwd=checkout, env={**os.environ, "PYTHONPATH": f"{HARNESSES}:{ROOT}"},
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-4000:]
    assert "FullyShardedDataParallel: strategy optim_grads_params over 2 ranks" in done.stdout
