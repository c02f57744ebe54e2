"""`megatron_times.py`: what it reads of a log, and the command lines of its rows."""

from __future__ import annotations

from pathlib import Path

import megatron_times
import pytest

CHECKS = ()  # of scripts/megatron_times.py

_LINE = (
    " [2026-11-29 21:00:00] iteration {number:8}/      20 | consumed samples: 80 | "
    "elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.0E-04 | lm loss: {loss} | "
    "loss scale: 1.0 | grad norm: 1.25 | number of skipped iterations: 0 |"
)


def test_times_leave_out_the_first_iterations() -> None:
    lines = [
        _LINE.format(number=number, ms=1000 if number <= 5 else 10 * number, loss=f"{number}.0E+00")
        for number in range(1, 9)
    ]
    lines.insert(
        2, "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1 | max allocated: 2048"
    )
    lines.insert(
        3, "[Rank 1] (after 2 iterations) memory (MB) | allocated: 1 | max allocated: 4096"
    )
    times = megatron_times.times_of("\n".join(lines))
    assert times == megatron_times.Times((60.0, 70.0, 80.0), 2.0, "8.0E+00", "1.25")
    assert megatron_times.line_of("ours", times).split() == [
        "ours", "70.0", "60.0", "80.0", "2.00", "8.0E+00", "1.25",
    ]  # fmt: skip


def test_a_log_without_timed_iterations_is_an_error() -> None:
    with pytest.raises(ValueError, match="no iteration after iteration 5"):
        megatron_times.times_of(_LINE.format(number=5, ms=1, loss="1.0E+00"))


def test_only_ours_is_run_by_the_runner(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    given = megatron_times.parsed(["--checkout", str(tmp_path), "--ranks", "4", "--flags=--seed 7"])
    script = tmp_path / "pretrain_gpt.py"
    for name, row in megatron_times.ROWS.items():
        command = megatron_times.command_of(row, "dsv3-proxy", script, given)
        assert ("megatron_fsdp_adapter" in command) is (name == "ours")
        assert ("--use-megatron-fsdp" in command) is (name != "ddp")
        assert command[command.index("--global-batch-size") + 1] == "8"
        assert command[-2:] == ["--seed", "7"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--rows=ddp,v3"], "'v3' is unknown"),
        (["--iterations=5"], "must be above 5"),
        (["--checkout=nowhere"], "has no pretrain_gpt.py"),
    ],
)
def test_bad_arguments_are_errors(
    words: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    with pytest.raises(SystemExit, match="2"):
        megatron_times.parsed([f"--checkout={tmp_path}", *words])
    assert error in capsys.readouterr().err
