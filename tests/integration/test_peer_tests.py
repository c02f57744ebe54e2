"""Megatron-LM's unit tests of its own FSDP wrapper and of `megatron_fsdp.fully_shard`, unmodified,
with ours in their place, on 2 GPUs or gloo ranks.

Of the checkout it needs the scripts in its root, megatron/{training,rl,legacy}, and of tests/:
__init__.py, unit_tests/__init__.py, unit_tests/test_utilities.py and
unit_tests/distributed/{megatron_fsdp,mfsdp_v1}. On GPUs it needs Transformer Engine 2.7 or newer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.lib.integration.lm_runs import HARNESSES, ROOT

CHECKS = ("megatron/wrapper/adapter.py", "plain/megatron_fsdp.py")

FOLDER = "tests/unit_tests/distributed"
FULLY_SHARD = "test_mfsdp_fully_shard.py"
FILE = "test_mcore_fully_sharded_data_parallel.py"
ON_GPUS = torch.cuda.is_available()
CANNOT_RUN = {
    "MambaSSM is not installed": "this release's test trains a Mamba model, which needs mamba_ssm",
    "s\n1 skipped, ": "this release's test skips itself on two ranks",
}
"""What the output has, and why a test says nothing here."""


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
    for sign, reason in CANNOT_RUN.items():
        if sign in done.stdout:
            pytest.skip(reason)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert " passed" in done.stdout, told


OF_FULLY_SHARD = {
    # ranks, tests: how many pass on each rank; newer releases have more
    (2, "ez or root_module or frozen or loss_curve"): 7,
    # all strategies, FSDP, HSDP and HFSDP, with ranks of other axes, and DCP; other meshes by
    # themselves, as the tests leave the process groups of each, with their threads
    (8, "cnn and mesh_dim_config0"): 19,
}


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "tests"), OF_FULLY_SHARD)
def test_the_peers_tests_of_fully_shard_pass_with_ours(
    megatron_lm: Path, ranks: int, tests: str
) -> None:
    if not (megatron_lm / FOLDER / "mfsdp_v1" / FULLY_SHARD).exists():  # it imports otherwise
        pytest.skip("this release has no such test")
    if ON_GPUS and torch.cuda.device_count() < ranks:
        pytest.skip(f"it needs {ranks} GPUs")
    done = _run(megatron_lm, FULLY_SHARD, "fully_shard_tests", tests, ranks)
    passed = [int(count) for count in re.findall(r"(\d+) passed", done.stdout)]
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert len(passed) == ranks, told
    assert min(passed) >= OF_FULLY_SHARD[ranks, tests], done.stdout


def _run(
    megatron_lm: Path, file: str, plugin: str, test: str, ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    """Runs tests of a file. The checkout is first on the path: it has a folder `tests` of its own.
    The conftest of the tests is left out, which downloads data sets, and their configuration of
    pytest."""
    checkout = str(megatron_lm.resolve())
    (path,) = Path(checkout, FOLDER).glob(f"*/{file}")
    of_ranks = f"-m torch.distributed.run --nproc_per_node {ranks} --standalone"
    options = f"--import-mode=importlib -p no:cacheprovider -p {plugin} -q -s"
    command = [sys.executable, "-W", "ignore", *of_ranks.split(), "-m", "pytest"]
    command += ["-c", os.devnull, "--rootdir", checkout, "--confcutdir", str(path.parent)]
    command += [*options.split(), "-k", test, str(path)]

    folders = [checkout, str(ROOT), str(HARNESSES)]
    environment = dict(os.environ)
    if environment.get("PYTHONPATH"):
        folders.append(environment["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    environment["MEGATRON_LM_PATH"] = checkout
    environment["OMP_NUM_THREADS"] = "1"
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    return subprocess.run(
        command,
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
