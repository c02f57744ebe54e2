"""Megatron-LM's unit tests of its own FSDP wrapper and of `megatron_fsdp.fully_shard`, unmodified,
with ours in their place, on 2 GPUs or gloo ranks.

Of the checkout it needs the scripts in its root, megatron/{training,rl,legacy}, and of tests/:
__init__.py, unit_tests/__init__.py, unit_tests/test_utilities.py and
unit_tests/distributed/{megatron_fsdp,mfsdp_v1}. On GPUs it needs Transformer Engine 2.7 or newer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.lm_runs import HARNESSES, ROOT

FOLDER = "tests/unit_tests/distributed"
FULLY_SHARD = "test_mfsdp_fully_shard.py"
FILE = "test_mcore_fully_sharded_data_parallel.py"
ON_GPUS = torch.cuda.is_available()


@pytest.mark.full
@pytest.mark.parametrize(
    "test",
    [
        "test_fsdp_with_process_groups",
        "test_fsdp_with_hybrid_sharding",
        "test_compatible_with_nd_parallel" + ("" if ON_GPUS else " and TP2 and not ETP2"),
        *(["not process_groups and not hybrid_sharding and not nd_parallel"] if ON_GPUS else []),
    ],
)
def test_the_peers_tests_pass_with_our_wrapper(megatron_lm: Path, test: str) -> None:
    done = _run(megatron_lm, FILE, "peer_tests", test)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.full
def test_the_peers_tests_of_fully_shard_pass_with_ours(megatron_lm: Path) -> None:
    """Those for 2 ranks: four strategies, a model that is its own unit class, frozen parameters,
    and a start on the meta device."""
    if not [*(megatron_lm / FOLDER).glob(f"*/{FULLY_SHARD}")]:
        pytest.skip("this release has no such test")
    done = _run(megatron_lm, FULLY_SHARD, "fully_shard_tests", "ez or root_module or frozen")
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout + done.stderr


def _run(
    megatron_lm: Path, file: str, plugin: str, test: str
) -> subprocess.CompletedProcess[str]:
    """Runs tests of a file on 2 ranks. The checkout is first on the path: it has a folder `tests`
    of its own. The conftest of the tests is left out, which downloads data sets, and their
    configuration of pytest."""
    checkout = megatron_lm.resolve()
    (path,) = (p for p in (checkout / FOLDER).glob(f"*/{file}"))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node", "2",
         "--standalone", "-m", "pytest", "-c", os.devnull, "--rootdir", str(checkout),
         "--confcutdir", str(path.parent), "--import-mode=importlib", "-p", "no:cacheprovider",
         "-p", plugin, "-q", "-s", "-k", test, str(path)],
        cwd=checkout, env={
            **os.environ, "MEGATRON_LM_PATH": str(checkout), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT), str(HARNESSES),
                                           *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        },
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
