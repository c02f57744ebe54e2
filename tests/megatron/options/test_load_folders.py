"""The checkpoint that a run would load is looked at before a model is built, and no other one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_adapter.checkpoint.folders import TRACKER
from megatron_fsdp_adapter.megatron.options.load_folders import load_problems, newest_problems
from tests.lib.megatron.launch_cases import parsed_arguments

CHECKS = ("megatron/options/load_folders.py", "checkpoint/folders.py")

OURS = ".metadata"
TORCH_DIST = "metadata.json"
LEGACY = "mp_rank_00/model_optim_rng.pt"
NP = "non_persistent"
LOCAL = {"non_persistent_ckpt_type": "global"}


def _root(root: Path, tracker: str, **folders: str) -> None:
    """A root with a file in each folder (iteration, or "release")."""
    for name, file in folders.items():
        folder = root / (f"iter_{int(name[1:]):07d}" if name != "release" else name)
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("{}")
    root.mkdir(exist_ok=True)
    if tracker:
        (root / TRACKER).write_text(tracker)


Roots = dict[str, tuple[str, dict[str, str]]]
"""Path below the test's folder -> the tracker's text, and files by folder."""

CASES: dict[str, tuple[Roots, dict[str, Any], str]] = {
    "nothing there": ({}, {}, ""),
    "an empty root": ({"": ("", {})}, {}, ""),
    "ours": ({"": ("5", {"_5": OURS})}, {}, ""),
    "torch_dist": ({"": ("5", {"_5": TORCH_DIST})}, {}, "load=.*iter_0000005 is .*Convert it"),
    "an old torch_dist beside ours": ({"": ("5", {"_4": TORCH_DIST, "_5": OURS})}, {}, ""),
    "the old one, by its iteration": (
        {"": ("5", {"_4": TORCH_DIST, "_5": OURS})}, {"ckpt_step": 4}, "iter_0000004 is .*Convert",
    ),
    "ours, by its iteration": ({"": ("5", {"_4": OURS, "_5": TORCH_DIST})}, {"ckpt_step": 4}, ""),
    "a folder without a tracker is not read": ({"": ("", {"_5": TORCH_DIST})}, {}, ""),
    "torch_dist, published": (
        {"": ("release", {"release": TORCH_DIST})}, {}, "load=.*release is .*Convert it",
    ),
    "ours, published": ({"": ("release", {"release": OURS})}, {"no_save_optim": True}, ""),
    "the legacy format": (
        {"": ("5", {"_5": LEGACY})}, {}, r"legacy format .*Load its weights alone \(--finetune\)",
    ),
    "its weights": ({"": ("5", {"_5": LEGACY})}, {"finetune": True}, ""),
    "its weights, without states": (
        {"": ("5", {"_5": LEGACY})}, {"no_load_optim": True, "no_load_rng": True}, "",
    ),
    "an iteration that is not there": (
        {"": ("5", {"_5": OURS})}, {"ckpt_step": 7},
        "no iter_0000007, which ckpt_step=7 names; complete in .*: iteration 5",
    ),
    "a tracker that names nothing": (
        {"": ("5", {"_4": OURS})}, {}, "no iter_0000005, which its .* names; .*iteration 4",
    ),
    "a damaged tracker": ({"": ("5x", {"_5": OURS})}, {}, "holds '5x', and no iteration"),
    "an optimizer that is not asked for": (
        {"": ("5", {"_5": OURS})}, {"no_save_optim": True}, "Add --no-load-optim",
    ),
    "generators, which are asked for later": (
        {"": ("5", {"_5": OURS})}, {"no_save_rng": True}, "",
    ),
    "neither is wanted": (
        {"": ("5", {"_5": OURS})},
        {"no_save_optim": True, "no_save_rng": True, "no_load_optim": True, "no_load_rng": True},
        "",
    ),
    "nor by a finetuning": (
        {"": ("5", {"_5": OURS})}, {"no_save_optim": True, "no_save_rng": True, "finetune": True},
        "",
    ),
    "nor by a fresh run": ({}, {"no_save_optim": True, "no_save_rng": True}, ""),
    "pretrained torch_dist": (
        {"p": ("5", {"_5": TORCH_DIST})}, {"pretrained_checkpoint": "p"},
        "pretrained_checkpoint=.*Convert",
    ),
    "pretrained, which is not read": (
        {"": ("5", {"_5": OURS}), "p": ("5", {"_5": TORCH_DIST})}, {"pretrained_checkpoint": "p"},
        "",
    ),
    "pretrained legacy": (
        {"p": ("5", {"_5": LEGACY})}, {"pretrained_checkpoint": "p", "load": None}, "",
    ),
    "the newest is not persistent": (
        {"": ("5", {"_5": TORCH_DIST}), NP: ("6", {"_6": OURS})}, LOCAL, "",
    ),
    "the newest is not persistent, in torch_dist": (
        {"": ("5", {"_5": OURS}), NP: ("6", {"_6": TORCH_DIST})}, LOCAL,
        "non_persistent_global_ckpt_dir=.*iter_0000006 is .*Convert",
    ),
    "an older one is not read": (
        {"": ("7", {"_7": OURS}), NP: ("6", {"_6": TORCH_DIST})}, LOCAL, "",
    ),
    "without the option neither": (
        {"": ("5", {"_5": OURS}), NP: ("6", {"_6": TORCH_DIST})}, {}, "",
    ),
}  # fmt: skip
"""Roots, arguments beside --load, and the one problem."""


@pytest.mark.parametrize("case", CASES)
def test_the_checkpoint_that_would_be_loaded_is_looked_at(tmp_path: Path, case: str) -> None:
    roots, given, expected = CASES[case]
    for place, (tracker, files) in roots.items():
        _root(tmp_path / place, tracker, **files)
    args = parsed_arguments(**{"load": str(tmp_path), **given})
    if "pretrained_checkpoint" in given:
        args.pretrained_checkpoint = str(tmp_path / given["pretrained_checkpoint"])
    found = load_problems(args)
    assert len(found) == bool(expected)
    if expected:
        assert re.search(expected, found[0]), found


def test_addresses_are_left_alone() -> None:
    assert load_problems(parsed_arguments(load="msc://bucket/x")) == []


def test_without_a_text_the_newest_folder_is_looked_at(tmp_path: Path) -> None:
    """Megatron-Bridge's tracker is a pickle."""
    _root(tmp_path, "", _4=OURS, _5=TORCH_DIST)
    [problem] = newest_problems("checkpoint.load", str(tmp_path))
    assert problem.startswith("checkpoint.load=")
    (tmp_path / TRACKER).write_text("4")
    assert newest_problems("checkpoint.load", str(tmp_path)) == []
