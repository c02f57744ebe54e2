"""`fully_shard` in the place of torch's: where programs and libraries have imported that, and where
the environment asks for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard as theirs

from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter import leave_fsdp2, use_as_fsdp2
from megatron_fsdp_adapter.plain.by_environment import VARIABLE

CHECKS = ("plain/torch_fsdp.py", "plain/by_environment.py")


def test_it_takes_the_place_of_torchs_wherever_that_was_imported(monkeypatch: Any) -> None:
    library: Any = types.ModuleType("a_library_that_imported_it")
    library.shard = theirs
    monkeypatch.setitem(sys.modules, library.__name__, library)
    places = use_as_fsdp2()
    found = _places(library)
    again = use_as_fsdp2()
    left = leave_fsdp2()
    own = {f"{library.__name__}.shard", f"{__name__}.theirs"}
    assert {"torch.distributed.fsdp.fully_shard", *own} <= {*places} == {*left}
    assert again == []
    assert found == {ours}
    assert _places(library) == {theirs} != {ours}


def _places(library: Any) -> set[Any]:
    return {library.shard, torch.distributed.fsdp.fully_shard}


@pytest.mark.parametrize(
    ("value", "printed", "said"),
    [
        ("fsdp2", ours.__module__, "=fsdp2, fully_shard is in"), ("", theirs.__module__, ""),
        ("fsdp1", "", "=fsdp1: not known"),
    ],
)  # fmt: skip
def test_the_environment_has_it_take_that_place(
    tmp_path: Path, value: str, printed: str, said: str
) -> None:
    """torch loads the entry point that is in pyproject.toml. It prints once, if a process that it
    starts imports torch too."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    [entry] = re.findall(r'backends"\]\n(\S+) = "(.*)"', pyproject.read_text())
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\n{} = {}\n".format(*entry))
    code = (
        "import torch.distributed.fsdp as f, subprocess, sys; print(f.fully_shard.__module__); "
        "subprocess.run([sys.executable, '-c', 'import torch'], check=True)"
    )
    paths = [str(pyproject.parent), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, VARIABLE: value, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.stdout.strip() == printed, done.stderr
    assert bool(done.returncode) is not bool(printed), done.stderr
    if said:
        assert done.stderr.count(f"{VARIABLE}{said}") == 1
    else:
        assert VARIABLE not in done.stderr
