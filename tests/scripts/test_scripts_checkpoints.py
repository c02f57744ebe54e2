from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.dist_checkpointing as core_checkpoints
import pytest
import torch
from lib import checkpoints
from lib.checkpoints import Progress

TRAINEE: Any = SimpleNamespace(
    model=SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=False))
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one without process groups, and a state dictionary with nothing in it."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(checkpoints, "_torch_dist_state", lambda trainee, is_loading: {})
    monkeypatch.setattr(checkpoints, "_plain", lambda trainee, progress, options: {})


def _write(state: dict, folder: str) -> None:
    (Path(folder) / "metadata.json").write_text("{}")


def _save(root: Path, iteration: int, keep_last: int | None = None) -> None:
    options: Any = SimpleNamespace(most_recent_k=keep_last)
    checkpoints._save_torch_dist(None, str(root), TRAINEE, Progress(iteration), options)


def test_crash_while_saving_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_checkpoints, "save", _write)
    _save(tmp_path, 5)

    def crash(state: dict, folder: str) -> None:
        _write(state, folder)
        raise OSError("disk full")

    monkeypatch.setattr(core_checkpoints, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        _save(tmp_path, 6)
    assert checkpoints._latest_torch_dist(str(tmp_path)).name == "iter_0000005"
    monkeypatch.setattr(core_checkpoints, "save", _write)
    _save(tmp_path, 6)
    assert checkpoints._latest_torch_dist(str(tmp_path)).name == "iter_0000006"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "iter_0000005",
        "iter_0000006",
    ]


def test_older_checkpoints_are_deleted_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_checkpoints, "save", _write)
    for iteration in (1, 2, 3, 4):
        _save(tmp_path, iteration, keep_last=2)
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == [
        "iter_0000003",
        "iter_0000004",
    ]


def test_missing_and_half_written_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint was finished there"):
        checkpoints._latest_torch_dist(str(tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(FileNotFoundError, match="iter_0000007, which is missing or not complete"):
        checkpoints._latest_torch_dist(str(tmp_path))
    (tmp_path / "iter_0000007").mkdir()
    with pytest.raises(FileNotFoundError, match="not complete"):
        checkpoints._latest_torch_dist(str(tmp_path))


def test_another_number_of_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    checkpoints._require_same_ranks(tmp_path, {"world_size": 4})
    with pytest.raises(ValueError, match="saved by 2 processes, this run has 4"):
        checkpoints._require_same_ranks(tmp_path, {"world_size": 2})
