"""The folders of a checkpoint root: their names, and how a checkpoint is found.

    root/latest_checkpointed_iteration.txt   the tracker: number of the newest complete checkpoint
    root/iter_0000010/                       a complete checkpoint (torch DCP: .metadata, *.distcp)
    root/tmp.iter_0000010.5f0c2a91/          a running save, or the rest of a killed one
    root/old.iter_0000010/                   the previous iter_0000010, while it is replaced

`tmp.` and `old.` are prefixes because Megatron takes every `iter_*` for a checkpoint. The order of
steps of a save: `publishing.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_adapter.checkpoint import unpickling
from megatron_fsdp_adapter.checkpoint.atomic import TEMPORARY
from megatron_fsdp_adapter.checkpoint.record import read_record
from megatron_fsdp_adapter.core.problems import RefusedByAllRanks

TRACKER = "latest_checkpointed_iteration.txt"
REPLACED = "old."
_METADATA = ".metadata"
_FOREIGN = (
    (
        "metadata.json",
        "a checkpoint of megatron-core's dist_checkpointing (torch_dist)",
        "convert it with `megatron-fsdp-adapter convert`",
    ),
    (
        "mp_rank_*",
        "a checkpoint of Megatron's legacy format (torch)",
        "load its weights alone (--finetune), or load it with Megatron's DDP and save it with "
        "--ckpt-format torch_dist",
    ),
    (
        "*.safetensors",
        "a folder of safetensors",
        "import it with Megatron-Bridge (AutoBridge.import_ckpt)",
    ),
)
"""Files that only other formats have: (pattern, format, remedy)."""
NONCE = r"\.[0-9a-f]{8}"
_NAME = re.compile(rf"(?:(old\.)?iter_(\d{{7,}})|(tmp\.)iter_(\d{{7,}})(?:{NONCE})?)")


def final_folder(root: Path, iteration: int) -> Path:
    """The final folder of the checkpoint of `iteration`, by Megatron's naming."""
    return root / f"iter_{iteration:07d}"


def replaced_name(folder: Path) -> Path:
    """The name of the previous `folder` while the new one takes its name."""
    return folder.with_name(REPLACED + folder.name)


def iteration_of(folder: Path) -> int | None:
    """The number in a final folder's name; None if it has none."""
    prefix, number = parsed(folder)
    return None if prefix else number


def locate(path: Path, iteration: int | None = None) -> tuple[Path, int]:
    """The root and the iteration of the checkpoint at `path`: a root, or one of its folders.

    iteration: None for the newest of a root. Raises FileNotFoundError or ValueError as
    `read_tracker` does, and ValueError if `path` is one iteration and another is named.
    """
    own = iteration_of(path)
    if own is None or (path / TRACKER).exists():
        if iteration is None:
            iteration = read_tracker(path)
        return path, iteration
    if iteration not in (None, own):
        raise ValueError(f"{path} is iteration {own}, not {iteration}. Name its parent")
    return path.absolute().parent, own


def is_plain(path: Path) -> bool:
    """True if `path` itself is a folder of torch.distributed.checkpoint, as a program without
    Megatron writes: neither a root of checkpoints nor an iteration of one."""
    is_root = (path / TRACKER).exists()
    return not is_root and iteration_of(path) is None and (path / _METADATA).is_file()


def read_tracker(root: Path) -> int:
    """Number of the newest complete checkpoint.

    Raises FileNotFoundError without root or tracker, ValueError if the tracker holds no number.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"checkpoint folder {root} does not exist. Check the load path")
    tracker = root / TRACKER
    if not tracker.is_file():
        raise FileNotFoundError(
            f"{tracker} does not exist, so {root} has no newest checkpoint; {remedy(root)}"
        )
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise ValueError(
            f"{tracker} should hold an iteration number but holds {text[:40]!r}; {remedy(root)}"
        )
    return int(text)


def open_checkpoint(root: Path, iteration: int) -> tuple[Path, Metadata]:
    """The folder of a complete checkpoint and its torch DCP metadata.

    A save killed between its two renames leaves the previous checkpoint under its `old.` name only;
    that one is then opened. Raises FileNotFoundError if there is none, and ValueError if it is of a
    newer format, of another program, or half-written: no readable .metadata, or a data file missing
    or too short.
    """
    folder = find_folder(root, iteration)
    return folder, read_metadata(root, folder)


def find_folder(root: Path, iteration: int) -> Path:
    """The folder that `open_checkpoint` would open. Only its format is checked."""
    if not root.is_dir():
        raise FileNotFoundError(f"checkpoint folder {root} does not exist. Check the load path")
    folder = final_folder(root, iteration)
    if not _has_content(folder) and replaced_name(folder).is_dir():
        folder = replaced_name(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; {remedy(root)}")
    require_ours(root, folder)
    return folder


def complete_iterations(root: Path) -> tuple[int, ...]:
    """Numbers of the folders with a final name and a .metadata file, ascending."""
    found = []
    for path in root.iterdir():
        number = iteration_of(path)
        if number is not None and (path / _METADATA).is_file():
            found.append(number)
    return tuple(sorted(found))


def half_written(root: Path) -> tuple[str, ...]:
    """Names of the folders of saves that were killed, or still run."""
    return tuple(sorted(path.name for path in root.iterdir() if _is_half(path)))


def _is_half(path: Path) -> bool:
    # True for a temporary folder, and for a final one without .metadata.
    prefix, number = parsed(path)
    if number is None or prefix == REPLACED:
        return False
    # A broken link is not a half-written checkpoint.
    return prefix == TEMPORARY or (path.exists() and not (path / _METADATA).is_file())


def parsed(path: Path) -> tuple[str, int | None]:
    """The prefix and the iteration in a folder's name; the iteration is None for other names."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return "", None
    return match[1] or match[3] or "", int(match[2] or match[4])


def _has_content(folder: Path) -> bool:
    try:
        return folder.is_dir() and any(folder.iterdir())
    except FileNotFoundError:  # renamed meanwhile
        return False


def is_complete(folder: Path) -> bool:
    """True if `folder` is a checkpoint or a link, without a look at its data files."""
    return folder.is_symlink() or (folder / _METADATA).is_file()


def is_taken(folder: Path) -> bool:
    """True if `folder` must not be overwritten: it has content, or it is a link (whatever its
    target is)."""
    return folder.is_symlink() or _has_content(folder)


def require_ours(root: Path, folder: Path, also: str | None = None) -> None:
    """Raises ValueError for a checkpoint of `root` in a format that this release does not read. It
    is not damaged. also: a pattern of `_FOREIGN` that is read here."""
    read_record(folder)
    found = foreign(folder, also)
    if found is not None:
        what, advice = found
        raise RefusedByAllRanks(
            f"{folder} is {what}, not a checkpoint in the format fsdp_dtensor: {advice}; "
            f"{remedy(root, folder)}"
        )


def foreign(folder: Path, also: str | None = None) -> tuple[str, str] | None:
    """(format, remedy) of a folder in another format; None for any other folder. also: as in
    `require_ours`."""
    for pattern, what, advice in _FOREIGN:
        if pattern != also and next(folder.glob(pattern), None) is not None:
            return what, advice
    return None


def _broken(root: Path, folder: Path, why: str) -> ValueError:
    return RefusedByAllRanks(f"{folder} is half-written: {why}; {remedy(root, folder)}")


def _unpickled(root: Path, folder: Path) -> Metadata:
    if not (folder / _METADATA).is_file():
        raise _broken(root, folder, "it has no .metadata file")
    try:
        return unpickling.read_metadata(folder / _METADATA)
    except unpickling.RefusedName as error:
        raise ValueError(
            f"{folder} is not trusted: its .metadata has content that "
            f"torch.distributed.checkpoint does not write ({error}). Nothing in it was executed"
        ) from error
    except ValueError as error:
        what = f"{folder} is damaged: {error}; {remedy(root, folder)}"
        raise RefusedByAllRanks(what) from error
    except Exception as error:
        # pickle may raise any error on damaged bytes
        why = f".metadata cannot be read ({type(error).__name__}: {error})"
        what = f"{folder} is damaged: {why}; {remedy(root, folder)}"
        raise RefusedByAllRanks(what) from error


def read_metadata(root: Path, folder: Path) -> Metadata:
    """The torch DCP metadata of a folder of any format based on DCP, such as `torch_dist`.

    Raises ValueError if the folder is half-written, as `open_checkpoint` does.
    """
    metadata = _unpickled(root, folder)
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        needed[name] = max(info.offset + info.length, needed.get(name, 0))
    for name, size in sorted(needed.items()):
        path = folder / name
        if not path.is_file():
            raise _broken(root, folder, f"{name} is missing")
        found = path.stat().st_size
        if found < size:
            raise _broken(root, folder, f"{name} has {found} of {size} bytes")
    return metadata


def remedy(root: Path, broken_folder: Path | None = None) -> str:
    """The end of an error's text: the checkpoints of `root` that can be loaded instead.

    broken_folder: the one that the error is about, however complete it looks."""
    broken_iteration = None if broken_folder is None else iteration_of(broken_folder)
    complete = [one for one in complete_iterations(root) if one != broken_iteration]
    own = "" if broken_folder is None else broken_folder.name
    broken = [name for name in half_written(root) if name != own]
    if complete:
        options = ", ".join(map(str, complete[-5:]))
        text = f"complete in {root}: iteration {options} (name one to load it)"
    elif broken_folder is None:
        text = f"{root} has no complete checkpoint"
    else:
        text = f"{root} has no other complete checkpoint"
    if broken:
        text += f"; half-written (the save was interrupted, or still runs): {', '.join(broken)}"
    return text
