"""A conversion that is interrupted leaves nothing that looks finished, and can be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.checkpoint.convert import convert
from tests.lib.checkpoint.checkpoint_cases import names
from tests.lib.checkpoint.convert_cases import Model, fsdp_state, save_fsdp

CHECKS = ("checkpoint/convert/conversion.py", "checkpoint/folders.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_fsdp(tmp_path / "a", fsdp_state(Model()))


def test_an_error_on_the_way_leaves_nothing_and_progress_is_by_block(
    source: Path, tmp_path: Path
) -> None:
    done: list[int] = []

    def advance(nbytes: int, total: int) -> None:
        done.append(nbytes)
        assert not list(tmp_path.glob("b/iter_*")), "a kill now would leave it unfinished"
        if sum(done) > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "b", "torch_dist", block_bytes=500, progress=advance)
    assert max(done) <= 500
    assert not list(tmp_path.glob("b/*"))
    assert not list(tmp_path.glob("*tmp*"))
    done.clear()
    report = convert(
        source, tmp_path / "b", "torch_dist", progress=lambda nbytes, total: done.append(nbytes)
    )
    assert sum(done) == report["nbytes"]
    assert (tmp_path / "b" / folders.TRACKER).exists()


def test_what_a_killed_conversion_left_is_no_result_of_another(
    source: Path, tmp_path: Path
) -> None:
    """Between the tracker's text and the name of its folder, as a kill at any later point."""
    target = tmp_path / "b"
    tracker = f"tmp.{folders.TRACKER}.7e61d24f"
    (target / "tmp.iter_0000003.8917dcc5").mkdir(parents=True)
    (target / tracker).write_text("3")
    convert(source, target, "torch_dist")
    assert names(target) == sorted(["iter_0000003", folders.TRACKER, tracker])
