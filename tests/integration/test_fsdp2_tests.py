"""PyTorch's own tests of FSDP2, unmodified, with `fully_shard` of this package in its place, on up
to 4 GPUs or gloo ranks. PYTORCH_SOURCE_PATH names a checkout of PyTorch, of which folders in
test/distributed are needed. What is skipped and what differs, with reasons, is in fsdp2_tests.py;
`FSDP2_SIDE=torch` runs torch's own in the same way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.lib.integration.lm_runs import HARNESSES, ROOT

CHECKS = ("plain/fsdp2.py", "plain/fsdp2_model.py")

FSDP = "test/distributed/_composable/fsdp/test_fully_shard_{}.py"
FILES = {
    "training": FSDP,
    "state_dict": FSDP,
    "mixed_precision": FSDP,
    "clip_grad_norm_": FSDP,
    "frozen": FSDP,
    "ignore_params": FSDP,
    "autograd": FSDP,
    "init": FSDP,
    "memory": FSDP,
    "comm": FSDP,
    "extensions": FSDP,
    "overlap": FSDP,
    "state": FSDP,
    "grad_scaler": FSDP,
    "compile": FSDP,
    "state_dict_of_dcp": "test/distributed/checkpoint/test_state_dict.py",
    "dsd": "test/distributed/checkpoint/fsdp/test_fsdp_dsd.py",
}
FOR_GPUS = {
    r'"cuda:0"|"cuda", 0(?=\))|"cuda", torch.cuda.current_device\(\)': '"cpu"',
    r"\bcuda\b": "cpu",
}
"""What older releases write for a GPU, and what is read for it on a machine without one."""


def _tests(path: Path, folder: Path) -> Path:
    """The file of tests at `path`; without a GPU a copy in `folder`, for CPUs."""
    if torch.cuda.is_available():
        return path
    text = path.read_text()
    for pattern, replacement in FOR_GPUS.items():
        text = re.sub(pattern, replacement, text)
    copy = folder / path.name
    copy.write_text(text)
    return copy


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_torchs_tests_of_fsdp2_pass_with_ours(name: str, tmp_path: Path) -> None:
    source = os.environ.get("PYTORCH_SOURCE_PATH")
    if not source:
        pytest.skip("PYTORCH_SOURCE_PATH names no checkout of PyTorch")
    pytest.importorskip("expecttest", reason="torch's tests need the package expecttest")
    original = Path(source).resolve() / FILES[name].format(name)
    if not original.exists():
        pytest.skip(f"{source} has no {original.name}")
    path = _tests(original, tmp_path)
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
