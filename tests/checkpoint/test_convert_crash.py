"""A conversion that is interrupted leaves nothing that looks finished, and can be repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_cases import names
from convert_cases import Model, differences, fsdp_state, load_all, save_fsdp

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.checkpoint.convert import convert

PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from megatron_fsdp_adapter.checkpoint.convert import convert
source, target, to, point = sys.argv[1:]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

seen = []
def watch(event, args):  # every operation on the target
    names = [str(a) for a in args if isinstance(a, (str, bytes, os.PathLike))]
    if any(Path(target).name in name for name in names):
        seen.append(event)
        if len(seen) == int(point):
            die()

def advance(name, nbytes):
    seen.append(name)
    if len(seen) == int(point):
        die()

sys.addaudithook(watch)
convert(Path(source), Path(target), to, block_bytes=2000, progress=advance)
print(len(seen))
"""


def run(source: Path, target: Path, to: str, point: int) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(here=str(Path(__file__).parent))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, source, target, to, str(point)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_fsdp(tmp_path / "a", fsdp_state(Model()))


def is_finished(target: Path) -> bool:
    """Whether what is there is taken for a result."""
    return (target / folders.TRACKER).exists()


@pytest.mark.full
def test_killed_anywhere_nothing_unfinished_has_a_final_name(source: Path, tmp_path: Path) -> None:
    to = "torch_dist"
    convert(source, tmp_path / "whole", to, block_bytes=2000)
    alone = run(source, tmp_path / "alone", to, 0)
    assert alone.returncode == 0, alone.stderr
    points = int(alone.stdout.split()[-1])
    assert points > 20
    for point in sorted({*range(1, points, 1 + points // 8), *range(points - 6, points + 1)}):
        target = tmp_path / f"out{point}"
        done = run(source, target, to, point)
        assert done.returncode == -9, (point, done.stderr)
        finals = [p for p in target.glob("iter_*") if not p.name.endswith(".tmp")]
        # Between the last rename and the tracker, a folder is whole though not the newest yet.
        for final in finals:
            assert differences(load_all(final), load_all(tmp_path / "whole" / final.name)) == []
        if finals:
            continue
        assert not is_finished(target)
        convert(source, target, to, block_bytes=2000)
        assert is_finished(target)


def test_an_error_on_the_way_leaves_nothing(source: Path, tmp_path: Path) -> None:
    blocks = 0

    def advance(nbytes: int, total: int) -> None:
        nonlocal blocks
        blocks += 1
        if blocks == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "b", "torch_dist", block_bytes=2000, progress=advance)
    assert blocks == 9
    assert not list(tmp_path.glob("b/*")) and not list(tmp_path.glob("*tmp*"))
    convert(source, tmp_path / "b", "torch_dist")
    assert is_finished(tmp_path / "b")


def test_what_a_killed_conversion_left_is_no_result_of_another(
    source: Path, tmp_path: Path
) -> None:
    """Between the tracker's text and the name of its folder, as a kill at any later point."""
    target, tracker = tmp_path / "b", f"tmp.{folders.TRACKER}.7e61d24f"
    (target / "tmp.iter_0000003.8917dcc5").mkdir(parents=True)
    (target / tracker).write_text("3")
    convert(source, target, "torch_dist")
    assert names(target) == sorted(["iter_0000003", folders.TRACKER, tracker])


def test_progress_advances_block_by_block(source: Path, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    report = convert(source, tmp_path / "b", "torch_dist", block_bytes=500,
                     progress=lambda *block: done.append(block))  # fmt: skip
    blocks = [nbytes for nbytes, _ in done]
    assert {total for _, total in done} == {sum(blocks)} == {report["nbytes"]}
    assert max(blocks) <= 500
