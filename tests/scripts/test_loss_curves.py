"""loss_curves.py: which runs it makes, what it compares, and what a bad one does."""

from __future__ import annotations

import json
from pathlib import Path

import loss_curves as script
import pytest
from lib.options import parse

from tests.lib.scripts.script_runs import ROOT

CHECKS = ()  # of scripts/loss_curves.py

OURS = script.OURS


@pytest.mark.parametrize("name", script.SETS)
def test_each_run_of_a_set_is_a_call_of_the_training_script(name: str) -> None:
    for subject, seed in script.parse_runs(name).values():
        words = script.words_of(subject, seed)
        options = parse([f"--config={ROOT / 'configs' / 'fp8-small.yaml'}", "--mock-data", *words])
        assert options.use_megatron_fsdp is subject.is_ours
        assert options.seed == seed
        assert (options.optimizer == "muon") is (subject.kind == "ours-muon")
        assert options.fp8_param_gather is ("fp8w" in subject.name)


@pytest.mark.parametrize("text", ("ours@bf16#1", f"{OURS}@bf16", "floor@bf16#1", "ours-graph#1"))
def test_a_run_that_cannot_be_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([f"--runs={text}"]) == 2
    assert f"--runs {text}" in capsys.readouterr().err


def test_equal_logs_and_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    for path, loss in zip(paths, (1.0, 1.0 + 2**-52), strict=True):
        path.write_text(json.dumps({"iteration": 1, "loss": loss}) + "\n")
    same = ["--compare", str(paths[0]), str(paths[0]), f"--png={tmp_path / 'curves.png'}"]
    assert script.main(same) == 0
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert script.main(["--compare", *map(str, paths)]) == 1
    assert "iteration 1: loss 1.0 and 1.0000000000000002" in capsys.readouterr().err
    assert script.main(["--compare", str(paths[0]), str(tmp_path / "none")]) == 2


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_ranks_train_and_are_compared(tmp_path: Path) -> None:
    names = f"{OURS}@bf16#1,ddp@bf16#1,{OURS}@bf16#2"
    tiny = [
        "--num-layers=2", "--hidden-size=64", "--ffn-hidden-size=128", "--num-attention-heads=2",
        "--num-query-groups=1", "--seq-length=32", "--max-position-embeddings=32",
        "--train-iters=25", "--micro-batch-size=2", "--eval-iters=1",
    ]  # fmt: skip
    assert script.main([f"--out={tmp_path}", f"--runs={names}", *tiny]) == 0
    assert "spread of the seeds of bf16: 0." in (tmp_path / "table.md").read_text()
