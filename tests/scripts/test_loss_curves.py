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
    preset = ROOT / "configs" / "fp8-small.yaml"
    for subject, seed in script.parse_runs(name).values():
        words = script.words_of(subject, seed)
        options = parse([f"--config={preset}", "--mock-data", *words])
        assert options.use_megatron_fsdp is subject.is_ours
        assert options.seed == seed
        assert (options.optimizer == "muon") is (subject.kind == "ours-muon")
        assert options.fp8_param_gather is ("fp8w" in subject.name)


@pytest.mark.parametrize("text", ("ours@bf16#1", f"{OURS}@bf16", "floor@bf16#1", "ours-graph#1"))
def test_a_run_that_cannot_be_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([f"--runs={text}"]) == 2
    assert f"--runs {text}" in capsys.readouterr().err


def test_equal_logs_and_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def logged(name: str, loss: float) -> str:
        path = tmp_path / name
        path.write_text(json.dumps({"iteration": 1, "loss": loss}) + "\n")
        return str(path)

    one = logged("one.jsonl", 1.0)
    two = logged("two.jsonl", 1.0 + 2**-52)
    picture = tmp_path / "curves.png"
    assert script.main(["--compare", one, one, f"--png={picture}"]) == 0
    assert picture.stat().st_size > 1000
    assert script.main(["--compare", one, two]) == 1
    assert "iteration 1: loss 1.0 and 1.0000000000000002" in capsys.readouterr().err
    assert script.main(["--compare", one, str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("ddp", "status", "said"),
    (
        ({"loss": 1.0, "grad_norm": 2.002}, 0, "equal bit for bit, gradient norms to 1e-03"),
        ({"loss": 1.0 + 2**-52, "grad_norm": 2.0}, 1, "iteration 1: loss 1.0 and"),
    ),
)
def test_losses_are_compared_with_those_of_ddp(
    ddp: dict[str, float],
    status: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A picture shows all three curves, and the moment of the resume."""

    def logged(name: str, **numbers: float) -> str:
        path = tmp_path / name
        path.write_text(json.dumps({"iteration": 1, **numbers}) + "\n")
        return str(path)

    ours = logged("ours.jsonl", loss=1.0, grad_norm=2.0)
    picture = tmp_path / "curves.png"
    arguments = ["--compare", ours, ours, "--ddp", logged("ddp.jsonl", **ddp), f"--png={picture}"]
    assert script.main([*arguments, "--resumed-at=1"]) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert picture.stat().st_size > 1000


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_ranks_train_and_are_compared(tmp_path: Path) -> None:
    names = f"{OURS}@bf16#1,ddp@bf16#1,{OURS}@bf16#2"
    tiny = [
        "--num-layers=2",
        "--hidden-size=64",
        "--ffn-hidden-size=128",
        "--num-attention-heads=2",
        "--num-query-groups=1",
        "--seq-length=32",
        "--max-position-embeddings=32",
        "--train-iters=25",
        "--micro-batch-size=2",
        "--eval-iters=1",
    ]
    assert script.main([f"--out={tmp_path}", f"--runs={names}", *tiny]) == 0
    table = (tmp_path / "table.md").read_text()
    assert "spread of the seeds of bf16: 0." in table
