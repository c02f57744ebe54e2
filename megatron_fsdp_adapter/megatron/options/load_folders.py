"""Problems of the checkpoints that a run would load, found before a model is built.

Only the folder that will be read is looked at: the one that a tracker or `--ckpt-step` names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checkpoint import folders
from .rules import is_on

RELEASE = "release"
"""The name of a folder, and the tracker's text, of weights that were published."""
LEGACY = "mp_rank_*"
"""Files of the legacy format. Its weights are loaded as a wrapped module loads plain tensors."""
NON_PERSISTENT = "non_persistent"
"""Megatron-LM's folder of non-persistent checkpoints."""

LOAD_ARGUMENTS = frozenset(
    (
        "load",
        "pretrained_checkpoint",
        "ckpt_step",
        "non_persistent_global_ckpt_dir",
        "finetune",
        "no_load_optim",
        "no_load_rng",
        "no_save_optim",
        "skip_train",
    )
)
"""Arguments of Megatron-LM that `load_problems` reads."""


def _named(root: Path) -> str:
    """The tracker's text; empty without one."""
    tracker = root / folders.TRACKER
    return tracker.read_text().strip() if tracker.is_file() else ""


def _folder_of(root: Path, name: str) -> Path:
    return root / RELEASE if name == RELEASE else folders.final_folder(root, int(name))


def _number(root: Path, step: int | None) -> int:
    """The iteration that would be read; -1 if there is none."""
    text = str(step) if step else _named(root)
    return int(text) if text.isdecimal() else -1


def foreign_problems(
    option: str, root: str, folder: Path, is_weights_only: bool = False
) -> list[str]:
    """A problem if `folder`, below `root`, is a checkpoint in a format that is not read.
    is_weights_only: nothing else is read of it, which the legacy format allows."""
    found = folders.foreign(folder, LEGACY if is_weights_only else None)
    if found is None:
        return []
    what, remedy = found
    return [
        f"{option}={root!r}: {folder.name} is {what}, and not in the format fsdp_dtensor. "
        f"{remedy[0].upper()}{remedy[1:]}, or start without it"
    ]


def folder_problems(
    option: str, root: str | None, step: int | None = None, is_weights_only: bool = False
) -> list[str]:
    """Problems of the checkpoint that would be loaded from a root. No root, or one without a
    checkpoint, is valid; so is an address."""
    if not root or "://" in str(root):
        return []
    name = str(step) if step else _named(Path(root))
    if not name:
        return []
    if name != RELEASE and not name.isdecimal():
        return [
            f"{option}={root!r}: its {folders.TRACKER} holds {name[:40]!r}, and no iteration. "
            "Write the number of a complete checkpoint there, or name it by --ckpt-step"
        ]
    folder = _folder_of(Path(root), name)
    if not folder.is_dir():
        source = f"ckpt_step={step}" if step else f"its {folders.TRACKER}"
        return [
            f"{option}={root!r}: there is no {folder.name}, which {source} names; "
            f"{folders.remedy(Path(root))}"
        ]
    return foreign_problems(option, root, folder, is_weights_only)


def newest_problems(option: str, root: str | None) -> list[str]:
    """A problem if the newest checkpoint of a root is in another format, for programs whose tracker
    is no text. No root, or one without a checkpoint, is valid."""
    if not root or "://" in str(root):
        return []
    if _named(Path(root)):
        return folder_problems(option, root)
    found = sorted(Path(root).glob("iter_*"))
    return foreign_problems(option, root, found[-1]) if found else []


def source_of(args: Any) -> tuple[str, str | None, int | None]:
    """The option, the root, and the iteration that is named, of the checkpoint that a run of
    Megatron-LM would load. The root is None if the run names none."""
    root: str | None = getattr(args, "load", None)
    step: int | None = getattr(args, "ckpt_step", None)
    pretrained: str | None = getattr(args, "pretrained_checkpoint", None)
    if pretrained and not (root and _named(Path(root))):
        return "pretrained_checkpoint", pretrained, step
    beside: str | None = getattr(args, "non_persistent_global_ckpt_dir", None)
    if not beside and root:
        beside = str(Path(root) / NON_PERSISTENT)
    if getattr(args, "non_persistent_ckpt_type", None) == "global" and beside:
        of_root = _number(Path(root), step) if root else -1
        if _number(Path(beside), None) >= max(of_root, 0):
            return "non_persistent_global_ckpt_dir", beside, None
    return "load", root, step


def source_problems(args: Any) -> list[str]:
    """Problems of the folder that a run of Megatron-LM would load."""
    option, root, step = source_of(args)
    if option == "pretrained_checkpoint":
        is_weights_only = True
    elif option == "load":
        loads_no_state = is_on(args, "no_load_optim") and is_on(args, "no_load_rng")
        is_weights_only = is_on(args, "finetune") or loads_no_state
    else:
        is_weights_only = False
    return folder_problems(option, root, step, is_weights_only)


def load_problems(args: Any) -> list[str]:
    """Problems of the checkpoint that a run of Megatron-LM would load."""
    found = source_problems(args)
    option, _, _ = source_of(args)
    if option == "pretrained_checkpoint":
        return found
    root: str | None = getattr(args, "load", None)
    step: int | None = getattr(args, "ckpt_step", None)
    if root and not is_on(args, "finetune") and (step or _named(Path(root)) not in ("", RELEASE)):
        found += _left_out_of_loads(args)
    return found


def _left_out_of_loads(args: Any) -> list[str]:
    """Problems of what Megatron leaves out of the state that it loads because it does not save it,
    and then asks for."""
    loads_optimizer = not is_on(args, "no_load_optim") and not is_on(args, "skip_train")
    if not loads_optimizer or not is_on(args, "no_save_optim"):
        return []
    return [
        "no_save_optim=True: Megatron-LM then reads no such state from --load either, and stops "
        "where it needs it. Add --no-load-optim, or leave this out"
    ]
