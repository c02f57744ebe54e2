"""PyTorch's own tests of FSDP2, unmodified, with `fully_shard` of this package in its place, on up
to 4 GPUs or gloo ranks. PYTORCH_SOURCE_PATH names a checkout of the release that is installed, of
which test/distributed/_composable/fsdp is needed. What is skipped and what differs, with reasons,
is in fsdp2_tests.py; `FSDP2_SIDE=torch` runs torch's own in the same way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.integration.lm_runs import HARNESSES, ROOT

CHECKS = ("plain/fsdp2.py", "plain/fsdp2_model.py")

FOLDER = "test/distributed/_composable/fsdp"
FILES = (
    "training",
    "state_dict",
    "mixed_precision",
    "clip_grad_norm_",
    "frozen",
    "ignore_params",
    "autograd",
    "init",
    "memory",
)


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_torchs_tests_of_fsdp2_pass_with_ours(name: str) -> None:
    source = os.environ.get("PYTORCH_SOURCE_PATH")
    if not source:
        pytest.skip("PYTORCH_SOURCE_PATH names no checkout of PyTorch")
    pytest.importorskip("expecttest", reason="torch's tests need the package expecttest")
    path = Path(source).resolve() / FOLDER / f"test_fully_shard_{name}.py"
    folders = [str(ROOT), str(HARNESSES)]
    environment = dict(os.environ)
    if environment.get("PYTHONPATH"):
        folders.append(environment["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    environment["OMP_NUM_THREADS"] = "1"
    environment["TORCHDYNAMO_DISABLE"] = "1"
    environment["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = "900"
    options = "-p no:cacheprovider -p fsdp2_tests -q -rA --tb=short"
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-c", os.devnull]
    command += ["--rootdir", str(path.parent), *options.split(), str(path)]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
