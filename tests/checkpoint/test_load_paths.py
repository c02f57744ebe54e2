"""The folder that Megatron-LM loads from, and the non-persistent checkpoints that it keeps, around
stand-ins for its functions. The functions themselves run in
tests/integration/test_checkpoint_flags.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_fsdp_adapter.checkpoint.folders import TRACKER
from megatron_fsdp_adapter.megatron.checkpoint.load_paths import without_training_state
from megatron_fsdp_adapter.megatron.compat.table import DRIVERS, LM
from tests.lib.megatron.stand_ins import stand_ins

CHECKS = ("megatron/checkpoint/load_paths.py", "megatron/checkpoint/checkpoint_drivers.py")

NP = "non_persistent"


def _number(root: str) -> int:
    return int(Path(root, TRACKER).read_text())


def _exists(root: str | None) -> bool:
    return root is not None and Path(root, TRACKER).is_file()


def _path(args: Any, load_arg: str = "load") -> str:
    step = args.ckpt_step or _number(args.load)
    return os.path.join(args.load, f"iter_{step:07d}")


def _load_base_checkpoint(load_dir: str, args: Any, sharded_state_dict: Any = None) -> Any:
    """The root that is read, and what the arguments say of it."""
    return None, load_dir, args.non_persistent_ckpt_type, args.ckpt_step


@pytest.fixture
def megatron() -> Iterator[ModuleType]:
    names = {
        "_NON_PERSISTENT_CKPT_SUBDIR": NP,
        "checkpoint_exists": _exists,
        "get_checkpoint_tracker_filename": lambda root: os.path.join(root, TRACKER),
        "read_metadata": lambda path: (int(Path(path).read_text()), False),
        "_get_non_persistent_iteration": lambda root, args: _number(root),
        "get_load_checkpoint_path_by_args": _path,
        "get_rng_state": lambda *args, **kwargs: {},
        "preprocess_fsdp_dtensor_state_dict": lambda *args: None,
        "cleanup_old_non_persistent_checkpoint": lambda *args: "Megatron's",
        "_load_base_checkpoint": _load_base_checkpoint,
    }
    variables = {"get_args": lambda: SimpleNamespace(ckpt_format="fsdp_dtensor")}
    modules = {LM: names, "megatron.training.global_vars": variables}
    with stand_ins(modules, DRIVERS) as made:
        yield made[LM]


def _checkpoints(root: Path, tracker: int, *iterations: int) -> str:
    for iteration in iterations or (tracker,):
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
    (root / TRACKER).write_text(str(tracker))
    return str(root)


def _args(**given: Any) -> SimpleNamespace:
    plain = {
        "load": None, "pretrained_checkpoint": None, "ckpt_step": None,
        "non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None,
        "ckpt_format": "fsdp_dtensor",
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **given})


GLOBAL = {"non_persistent_ckpt_type": "global"}

CASES: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "the newest": ({"a": 4}, {"load": "a"}, "a/4"),
    "a chosen one": ({"a": 4}, {"load": "a", "ckpt_step": 2}, "a/2"),
    "pretrained alone": ({"p": 9}, {"pretrained_checkpoint": "p"}, "p/9"),
    "pretrained, and nothing to resume": (
        {"p": 9}, {"pretrained_checkpoint": "p", "load": "a"}, "p/9",
    ),
    "pretrained, and a checkpoint to resume": (
        {"p": 9, "a": 4}, {"pretrained_checkpoint": "p", "load": "a"}, "a/4",
    ),
    "not persistent and newer": ({"a": 4, f"a/{NP}": 5}, {"load": "a", **GLOBAL}, f"a/{NP}/5"),
    "equally new": ({"a": 4, f"a/{NP}": 4}, {"load": "a", **GLOBAL}, f"a/{NP}/4"),
    "older": ({"a": 4, f"a/{NP}": 3}, {"load": "a", **GLOBAL}, "a/4"),
    "the only ones": ({f"a/{NP}": 3}, {"load": "a", **GLOBAL}, f"a/{NP}/3"),
    "none": ({"a": 4}, {"load": "a", **GLOBAL}, "a/4"),
    "in a folder of their own": (
        {"a": 4, "n": 5}, {"load": "a", "non_persistent_global_ckpt_dir": "n", **GLOBAL}, "n/5",
    ),
    "older than a chosen one": (
        {"a": 4, f"a/{NP}": 5}, {"load": "a", "ckpt_step": 6, **GLOBAL}, "a/6",
    ),
    "without the option": ({"a": 4, f"a/{NP}": 5}, {"load": "a"}, "a/4"),
}  # fmt: skip
"""Roots with their newest iteration, arguments, and what is read."""


@pytest.mark.parametrize("case", CASES)
def test_the_newest_checkpoint_is_read_and_named(
    megatron: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """By both functions: the reader, and the one that says beforehand what will be read."""
    monkeypatch.chdir(tmp_path)
    roots, given, expected = CASES[case]
    for root, iteration in roots.items():
        _checkpoints(Path(root), iteration)
    root, _, number = expected.rpartition("/")
    args = _args(**given)
    before = dict(vars(args))
    assert megatron.get_load_checkpoint_path_by_args(args) == f"{root}/iter_{int(number):07d}"
    load_dir = args.load if _exists(args.load) or NP in expected else args.pretrained_checkpoint
    _, read, kind, step = megatron._load_base_checkpoint(load_dir, args)
    assert read == root
    is_beside = root not in (args.load, args.pretrained_checkpoint)
    assert (kind, step) == (
        (None, None) if is_beside else (args.non_persistent_ckpt_type, args.ckpt_step)
    )
    assert vars(args) == before


def test_other_formats_are_read_as_before(megatron: ModuleType, tmp_path: Path) -> None:
    _checkpoints(tmp_path / NP, 5)
    args = _args(ckpt_format="torch_dist", **GLOBAL)
    _, read, kind, _ = megatron._load_base_checkpoint(_checkpoints(tmp_path, 4), args)
    assert (read, kind) == (str(tmp_path), "global")


def test_a_published_folder_has_weights_alone() -> None:
    asked = ("model", "_model", "optimizer", "opt_param_scheduler", "rng_state", "iteration")
    left = without_training_state(dict.fromkeys(asked))
    assert set(left) == {"model", "_model", "iteration"}


@pytest.mark.parametrize(
    ("tracker", "stored", "kept"),
    [
        (3, (1, 2, 3), {3}),
        # Being renamed by a background save; or empty, of a save that was killed.
        (2, (1, 2, 3), {2, 3}),
        (3, (3,), {3}),
    ],
)
def test_what_the_tracker_names_is_kept(
    megatron: ModuleType, tmp_path: Path, tracker: int, stored: tuple[int, ...], kept: set[int]
) -> None:
    root = _checkpoints(tmp_path, tracker, *stored)
    empty = tmp_path / "iter_0000009"
    empty.mkdir()
    megatron.cleanup_old_non_persistent_checkpoint(root, leave_ckpt_num=1, do_async=False)
    found = {int(path.name.removeprefix("iter_")) for path in tmp_path.glob("iter_*")}
    assert found == kept | {9}


def test_without_a_tracker_nothing_is_deleted(megatron: ModuleType, tmp_path: Path) -> None:
    _checkpoints(tmp_path, 2, 1, 2)
    (tmp_path / TRACKER).unlink()
    megatron.cleanup_old_non_persistent_checkpoint(tmp_path)
    assert len(list(tmp_path.glob("iter_*"))) == 2
