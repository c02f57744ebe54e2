"""loss_curves.py: which runs it makes, what it says of them, and what a bad one does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import loss_curves as script  # noqa: E402
from lib.options import parse  # noqa: E402

OURS = script.OURS


def log(*losses: float, validation: float | None = None) -> dict:
    found = {step: {"iteration": step, "loss": loss} for step, loss in enumerate(losses, start=1)}
    if validation is not None:
        found[len(losses)]["validation_loss"] = validation
    return found


@pytest.mark.parametrize("name", script.SETS)
def test_each_run_of_a_set_is_a_call_of_the_training_script(name: str) -> None:
    for subject, seed in script.parse_runs(name).values():
        words = script.words_of(subject, seed)
        options = parse([f"--config={ROOT / 'configs' / 'fp8-small.yaml'}", "--mock-data", *words])
        assert options.use_megatron_fsdp is subject.is_ours and options.seed == seed
        assert (options.optimizer == "muon") is (subject.kind == "ours-muon")
        assert options.fp8_param_gather is ("fp8w" in subject.name)


@pytest.mark.parametrize("text", ("ours@bf16#1", f"{OURS}@bf16", "floor@bf16#1", "ours-graph#1"))
def test_a_run_that_cannot_be_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([f"--runs={text}"]) == 2
    assert f"--runs {text}" in capsys.readouterr().err


def test_runs_are_held_against_the_spread_of_seeds() -> None:
    logs = {
        f"{OURS}@bf16#1": log(1.5, 1.0), f"{OURS}@bf16#2": log(1.5, 1.2),
        f"{OURS}@fp8w_delayed#1": log(1.4, 1.2, validation=2.0),
    }  # fmt: skip
    text, inside = script.table_text(logs)
    assert inside and f"| {OURS}@fp8w_delayed#1 | 1.3000 | 2.0000 | +0.0500 |" in text
    assert "spread of the seeds of bf16: 0.1000" in text
    logs["ddp@fp8w_delayed#1"] = log(1.4, 1.5)
    assert not script.table_text(logs)[1]


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


def test_what_was_trained_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text_valid.idx").touch()
    names = [f"{OURS}@bf16#1", f"{OURS}@fp8w_delayed#1"]
    asked = []

    def fake(command: list[str], ranks: int, limit: float, log: Path) -> str | None:
        asked.append(command)
        if any("fp8" in word for word in command[3:] if "recipe" in word):
            return "rank 0 ended with status 1"
        unfinished = next(word for word in command if word.startswith("--loss-log-file="))
        Path(unfinished.partition("=")[2]).write_text(json.dumps({"iteration": 1, "loss": 2.0}))
        return None

    monkeypatch.setattr(script, "run_ranks", fake)
    call = [f"--out={tmp_path}", f"--runs={names[0]}"]
    assert script.main(call) == script.main(call) == 0
    assert len(asked) == 1
    monkeypatch.setattr(script, "run_ranks", lambda *_: "rank 0 ended with status 1")
    assert script.main([f"--out={tmp_path}", f"--runs={','.join(names)}"]) == 1
    assert f"{names[1]}: not trained: rank 0 ended" in capsys.readouterr().out


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
