"""Checkpoints go from one release of megatron-core, and of torch, to another and back, ours and
the bundled engine's: weights and moments bit for bit, and training goes on with the same losses.

Needs a second interpreter: MEGATRON_FSDP_ADAPTER_OTHER_PYTHON is its path,
MEGATRON_FSDP_ADAPTER_OTHER_PATH what is put in front of its module path, if anything.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lib.checkpoint.interop import assert_same

CHECKS = ("checkpoint/dcp.py", "checkpoint/training.py", "checkpoint/tensor_properties.py")

ROOT = Path(__file__).parents[2]
OTHER = os.environ.get("MEGATRON_FSDP_ADAPTER_OTHER_PYTHON")
OTHER_PATH = os.environ.get("MEGATRON_FSDP_ADAPTER_OTHER_PATH", "")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(OTHER is None, reason="MEGATRON_FSDP_ADAPTER_OTHER_PYTHON is not set"),
]


def _half(python: str, path: str, engine: str, action: str, folder: Path) -> dict[str, Any]:
    out = folder / f"{action}.pickle"
    folders = [str(ROOT)]
    if path:
        folders.append(path)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    done = subprocess.run(
        [python, "-m", "tests.lib.checkpoint.across", engine, action, str(folder), str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return pickle.loads(out.read_bytes())


@pytest.mark.parametrize("writer", ("here", "other"))
@pytest.mark.parametrize(
    ("saves", "loads"), [("ours", "ours"), ("bundled", "ours"), ("ours", "bundled")]
)
def test_a_checkpoint_of_one_release_loads_in_the_other(
    tmp_path: Path, saves: str, loads: str, writer: str
) -> None:
    here = (sys.executable, os.environ.get("PYTHONPATH", ""))
    other = (str(OTHER), OTHER_PATH)
    if writer == "here":
        first, second = here, other
    else:
        first, second = other, here
    saved = _half(*first, saves, "save", tmp_path)
    loaded = _half(*second, loads, "load", tmp_path)
    assert saved["release"] != loaded["release"]
    assert_same(loaded, saved)
