"""fp8_loss_curves.py: which runs it makes, what it says of them, and what a bad one does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import fp8_loss_curves as script  # noqa: E402
import muon_loss_curves as muon_script  # noqa: E402
from lib.bench_subjects import Subject  # noqa: E402
from lib.loss_curves import (  # noqa: E402
    DEFAULT_RUNS,
    LAST,
    Run,
    draw,
    parse_runs,
    smoothed,
    summary,
    table_text,
)

OURS = "ours:optim_grads_params"
TINY = [
    "--num-layers=2", "--hidden-size=64", "--ffn-hidden-size=128", "--num-attention-heads=2",
    "--num-query-groups=1", "--seq-length=32", "--max-position-embeddings=32", "--train-iters=25",
    "--micro-batch-size=2", "--eval-iters=1",
]  # fmt: skip


def runs(*names: str) -> list[Run]:
    return parse_runs(",".join(names))


def log(*losses: float, validation: float | None = None) -> dict:
    found = {step: {"iteration": step, "loss": loss} for step, loss in enumerate(losses, start=1)}
    if validation is not None:
        found[len(losses)]["validation_loss"] = validation
    return found


def test_the_default_has_three_seeds_of_bf16_and_ddp_beside_each_recipe() -> None:
    found = runs(DEFAULT_RUNS)
    assert [run.seed for run in found if run.is_reference] == [1, 2, 3]
    for recipe in ("tensorwise", "delayed", "blockwise"):
        ours = Run(Subject("ours", "optim_grads_params", f"fp8w_{recipe}"), 1)
        assert {ours, Run(Subject("ddp", None, f"fp8w_{recipe}"), 1)} <= set(found)
    assert len({run.file_name for run in found}) == len(found)
    assert runs(*(run.name for run in found)) == found


def test_runs_with_muon_are_held_against_the_ones_with_adam() -> None:
    found = runs(*muon_script.RUNS.split(","))
    assert [run.is_reference for run in found] == [True, False]
    assert [run.subject.has_muon for run in found] == [False, True]


@pytest.mark.parametrize(
    ("text", "words"),
    (
        ("ours:optim@bf16", "a seed"),
        ("ours@bf16#1", "must name one wrapper"),
        ("ddp#1", "its precision"),
        ("floor@bf16#1", "only ours and ddp"),
        ("ours-ce-graph@bf16#1", "without graphs"),
        (",", "names no run"),
    ),
)
def test_runs_that_are_not_understood(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_runs(text)


def test_what_a_table_says() -> None:
    """The spread is that of bf16's seeds; others are held against bf16 of the same seed."""
    one, two, ours, ddp, off = runs(
        f"{OURS}@bf16#1", f"{OURS}@bf16#2", f"{OURS}@fp8w_delayed#1", "ddp@fp8w_delayed#1",
        f"{OURS}@fp8w_blockwise#2",
    )  # fmt: skip
    flat = [9.0] + [2.0] * LAST
    logs = {
        one: log(*flat, validation=2.5), two: log(*[8.0] + [2.25] * LAST),
        ours: log(*[9.0] + [2.125] * LAST), ddp: log(*[9.5] + [2.125] * LAST),
        off: log(*[9.0] + [2.75] * LAST),
    }  # fmt: skip
    found = summary(logs)
    assert found.spread == 0.25 and found.outside == [off]
    lines = {line.run: line for line in found.lines}
    assert (lines[one].final, lines[one].validation, lines[one].apart) == (2.0, 2.5, None)
    assert (lines[ours].apart, lines[ours].from_ddp) == (0.125, 0.5)
    assert (lines[ddp].apart, lines[ddp].from_ddp) == (0.125, None)
    assert lines[off].from_ddp is None
    text = table_text(found)
    assert f"| {ours.name} | {LAST + 1} | 2.1250 |  | +0.1250 | 5.0e-01 |" in text
    assert f"0.2500; further off: {off.name}" in text


def test_a_loss_that_is_not_a_number_is_outside() -> None:
    one, two, ours = runs(f"{OURS}@bf16#1", f"{OURS}@bf16#2", f"{OURS}@fp8w_delayed#1")
    found = summary({one: log(2.0), two: log(3.0), ours: log(float("nan"))})
    assert found.outside == [ours]


def test_without_two_seeds_there_is_no_verdict() -> None:
    one, ours = runs(f"{OURS}@bf16#1", f"{OURS}@fp8w_delayed#1")
    found = summary({one: log(2.0), ours: log(9.0)})
    assert found.spread is None and found.outside == []
    assert "unknown, fewer than two ran" in table_text(found)


def test_means_of_neighbours() -> None:
    assert smoothed([2.0, 4.0]) == [2.0, 3.0]
    assert smoothed([float(i) for i in range(30)])[-1] == 24.5


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, ours = runs(f"{OURS}@bf16#1", f"{OURS}@fp8w_delayed#1")
    draw({one: log(2.0, 1.0), ours: log(2.0, 1.5)}, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_bad_options_are_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for bad, words in (("--run-limit=0", "--run-limit 0"), ("--hidden-sise=1", "--hidden-sise")):
        assert script.main([f"--out={tmp_path}", bad]) == 2
        assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_is_given_up_and_the_next_ones_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes die in the second run, and hang after the third; what fp8 needs is not here."""
    names = [f"{OURS}@bf16#{seed}" for seed in (1, 2, 3)]
    call = script.parse(
        [f"--out={tmp_path}", f"--runs={','.join([*names, 'ddp@fp8w_delayed#1'])}", *TINY]
    )
    (tmp_path / "data").mkdir()
    for split in ("train", "valid"):
        for end in ("bin", "idx"):
            (tmp_path / "data" / f"text_{split}.{end}").touch()
    asked = []

    def fake(command: list[str], ranks: int, limit: float, log: Path) -> str | None:
        asked.append(command[command.index("--runs") + 1].split(","))
        log.write_text("no room left\n")
        for name in asked[-1]:
            if name == names[1]:
                return "rank 0 ended with status 1"
            call.log(runs(name)[0]).write_text(json.dumps({"iteration": 1, "loss": 2.0}))
        return None

    monkeypatch.setattr(script, "run_ranks", fake)
    failed = script.train_all(call)
    assert asked == [names, names[2:]]
    one, two = runs(names[1], "ddp@fp8w_delayed#1")
    assert failed.keys() == {one, two}
    assert failed[one] == "rank 0 ended with status 1; no room left"
    assert "use --transformer-impl transformer_engine, on a GPU" in failed[two]
    assert call.todo() == [one, two]


@pytest.mark.parametrize(
    ("limits", "written", "reason", "told"),
    (
        ((), "Timeout (0:00:09)!\n", "rank 0 ended with status 1", "--run-limit 9 s: raise it"),
        ((), "a line\n", "not done after 14 s", "raise --start-limit or --run-limit; a line"),
        (("--time-limit=8",), "a line\n", "not done after 8 s", "raise --time-limit; a line"),
    ),
)  # fmt: skip
def test_a_limit_that_was_too_short_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[str, ...], written: str,
    reason: str, told: str,
) -> None:  # fmt: skip
    """Processes have --start-limit to load libraries, and then --run-limit for each run."""
    name = f"{OURS}@bf16#1"
    call = script.parse([f"--out={tmp_path}", f"--runs={name}", "--start-limit=5", "--run-limit=9",
                         *limits, *TINY])  # fmt: skip
    (tmp_path / "data").mkdir()
    for file in ("train.bin", "train.idx", "valid.bin", "valid.idx"):
        (tmp_path / "data" / f"text_{file}").touch()
    given = []

    def fake(command: list[str], ranks: int, limit: float, log: Path) -> str | None:
        given.append(limit)
        log.write_text(written)
        return reason

    monkeypatch.setattr(script, "run_ranks", fake)
    [found] = script.train_all(call).values()
    assert told in found and given == [pytest.approx(8 if limits else 14, abs=1)]


def test_rates_share_the_text_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, calls = iter([100.0, 101.0, 107.0, 111.0]), []
    monkeypatch.setattr(muon_script.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(script, "main", lambda arguments: calls.append(arguments) or 0)
    arguments = [f"--out={tmp_path}", "--rates=1e-3,2e-3,3e-3", "--time-limit=10", "--ranks=2"]
    assert muon_script.main(arguments) == 1
    parser = script.make_parser()
    given = [parser.parse_known_args(call)[0] for call in calls]
    assert [one.time_limit for one in given] == [9.0, 3.0]
    assert {one.data for one in given} == {tmp_path / "data"} and given[0].out != given[1].out
    assert {one.ranks for one in given} == {2}
    assert "3e-3: not trained: --time-limit is over" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_ranks_train_and_are_compared(tmp_path: Path) -> None:
    names = f"{OURS}@bf16#1,ddp@bf16#1,{OURS}@bf16#2"
    assert script.main([f"--out={tmp_path}", f"--runs={names}", *TINY]) == 0
    text = (tmp_path / "table.md").read_text()
    assert text.count("| 25 |") == 3 and "spread of the seeds of bf16: 0." in text
    assert (tmp_path / "curves.png").stat().st_size > 1000
