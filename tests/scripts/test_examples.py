"""The programs in examples/ train on two ranks, say that the model is sharded, and resume."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lib.scripts.script_runs import ROOT, run_script

CHECKS = ("plain/fsdp2.py",)

EXAMPLES = ROOT / "examples"
MOST_LINES = 80
OURS = "from megatron_fsdp_adapter import fully_shard"
TORCHS = "from torch.distributed.fsdp import fully_shard"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


def _steps(program: Path, steps: int, checkpoints: Path) -> list[str]:
    done = run_script(
        str(program), "--steps", str(steps), "--checkpoints", str(checkpoints), processes=2
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^DTensor \(256, 64\), here \(128, 64\)$", done.stdout, re.M)
    return re.findall(r"^step .*$", done.stdout, re.M)


def test_a_gpt_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    program = EXAMPLES / "fsdp2_gpt.py"
    found = _steps(program, 2, tmp_path / "saved") + _steps(program, 3, tmp_path / "saved")
    assert [line.split(":")[0] for line in found] == ["step 0", "step 1", "step 2"]


@pytest.mark.full
def test_a_gpt_prints_what_it_does_with_the_import_of_torch(tmp_path: Path) -> None:
    """Interrupted, and with PyTorch's function without a break: in every printed digit."""
    program = EXAMPLES / "fsdp2_gpt.py"
    found = _steps(program, 3, tmp_path / "saved") + _steps(program, 6, tmp_path / "saved")
    text = program.read_text()
    assert text.count(OURS) == 1
    changed = tmp_path / "torchs.py"
    changed.write_text(text.replace(OURS, TORCHS))
    assert found == _steps(changed, 6, tmp_path / "torchs")
