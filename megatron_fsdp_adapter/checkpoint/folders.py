"""The folders of a checkpoint root: their names, and the order of steps that makes a save safe.

    root/latest_checkpointed_iteration.txt   the tracker: number of the newest complete checkpoint
    root/iter_0000010/                       a complete checkpoint (torch DCP: .metadata, *.distcp)
    root/tmp.iter_0000010/                   one being written; half-written if nobody writes it
    root/old.iter_0000010/                   the previous iter_0000010, while it is being replaced

A folder gets its final name only when all of it is on disk, the tracker is changed after that,
and what is replaced or pruned is deleted last. A process killed between any two steps leaves the
checkpoint that the tracker names loadable. Everything here is done by one process; the file
system is assumed to rename atomically. The two other names are prefixes because Megatron takes
every `iter_*` for a checkpoint and reads a number from what follows.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_adapter.checkpoint.record import read_record

TRACKER = "latest_checkpointed_iteration.txt"
TEMPORARY, REPLACED = "tmp.", "old."
_METADATA = ".metadata"
_FOREIGN = (
    (
        "metadata.json",
        "a checkpoint of megatron-core's dist_checkpointing (torch_dist)",
        "convert it with `python -m megatron_fsdp_adapter convert`",
    ),
    ("mp_rank_*", "a checkpoint of Megatron's legacy format (torch)",
     "convert it to torch_dist with Megatron first"),
    ("*.safetensors", "a folder of safetensors",
     "convert it with `python -m megatron_fsdp_adapter convert`"),
)  # fmt: skip
"""What only other formats have in their folder: (pattern, what it is, what to do)."""
_NAME = re.compile(r"(tmp\.|old\.)?iter_(\d{7,})")


def final_folder(root: Path, iteration: int) -> Path:
    """Where the complete checkpoint of `iteration` lies, Megatron's name for it."""
    return root / f"iter_{iteration:07d}"


def temporary_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is written."""
    return temporary_name(final_folder(root, iteration))


def temporary_name(folder: Path) -> Path:
    """Where what will be `folder` is written. The same on every rank, so not random."""
    return folder.with_name(TEMPORARY + folder.name)


def replaced_name(folder: Path) -> Path:
    """Where the previous `folder` waits while the new one takes its name."""
    return folder.with_name(REPLACED + folder.name)


def prepare(root: Path, iteration: int) -> None:
    """`prepare_folder` of an iteration's folder."""
    prepare_folder(final_folder(root, iteration))


def prepare_folder(folder: Path) -> None:
    """Makes an empty temporary folder for `folder`; undoes what a killed save of it left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = temporary_name(folder), replaced_name(folder)
    if old.exists() and not _has_content(folder):
        os.rename(old, folder)
        sync_folder(folder.parent)
    _delete(path for path in (temporary, old) if path.exists())
    temporary.mkdir()


def rename_into_place(folder: Path) -> None:
    """Gives the temporary folder, all of which is on disk, its final name.

    A complete checkpoint of that name becomes the replaced one, and is left to be deleted; an empty
    folder, as Megatron makes one before it saves, is overwritten.
    """
    if _has_content(folder):
        os.rename(folder, replaced_name(folder))
    os.rename(temporary_name(folder), folder)
    sync_folder(folder.parent)


def iteration_of(folder: Path) -> int | None:
    """The number in a final folder's name; None if it has none."""
    match = _NAME.fullmatch(folder.name)
    return int(match[2]) if match and not match[1] else None


def publish_without_tracker(folder: Path) -> None:
    """Gives the temporary folder its name, and deletes what killed saves left. For Megatron's own
    saves, which write the tracker, and prune, themselves."""
    rename_into_place(folder)
    number = iteration_of(folder)
    if number is not None:
        _delete(_stale(folder.parent, number, None))


def publish(root: Path, iteration: int, keep_last: int | None) -> None:
    """Gives the temporary folder its name, then updates the tracker, then deletes what is stale.

    Stale are a replaced checkpoint, what killed saves of earlier iterations left, and with
    `keep_last` every complete checkpoint but this one and the keep_last - 1 nearest before it.
    """
    rename_into_place(final_folder(root, iteration))
    write_tracker(root, iteration)
    _delete(_stale(root, iteration, keep_last))


def write_tracker(root: Path, iteration: int) -> None:
    """Makes `iteration` the newest checkpoint of `root`, atomically."""
    write_atomically(root / TRACKER, str(iteration))


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file: whenever a process dies it has the text of before or all of the new one."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def read_tracker(root: Path) -> int:
    """Number of the newest complete checkpoint.

    Raises FileNotFoundError without root or tracker, ValueError if the tracker holds no number.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"checkpoint folder {root} does not exist; check the load path")
    tracker = root / TRACKER
    if not tracker.is_file():
        raise FileNotFoundError(
            f"{tracker} does not exist, so {root} has no newest checkpoint; {_remedy(root)}"
        )
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise ValueError(
            f"{tracker} should hold an iteration number but holds {text[:40]!r}; {_remedy(root)}"
        )
    return int(text)


def open_checkpoint(root: Path, iteration: int) -> tuple[Path, Metadata]:
    """The folder of a complete checkpoint and its torch DCP metadata.

    A save killed exactly between its two renames leaves the previous checkpoint under its `old.`
    name only; that one is then opened. Raises FileNotFoundError if there is none, and ValueError
    if it is of a newer format or another program's, or half-written: no readable .metadata, or a
    data file missing or too short.
    """
    folder = find_folder(root, iteration)
    return folder, _read_metadata(root, folder)


def find_folder(root: Path, iteration: int) -> Path:
    """The folder of `open_checkpoint`; what is in it is not looked at, but for its format."""
    if not root.is_dir():
        raise FileNotFoundError(f"checkpoint folder {root} does not exist; check the load path")
    folder = final_folder(root, iteration)
    if not _has_content(folder) and replaced_name(folder).is_dir():
        folder = replaced_name(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; {_remedy(root)}")
    require_ours(root, folder)
    return folder


def complete_iterations(root: Path) -> tuple[int, ...]:
    """Numbers of the folders with a final name and a .metadata file, ascending."""
    found = (
        int(match[2])
        for path in root.iterdir()
        if (match := _NAME.fullmatch(path.name))
        and not match[1]
        and (path / _METADATA).is_file()
    )
    return tuple(sorted(found))


def half_written(root: Path) -> tuple[str, ...]:
    """Names of the folders that a killed save left."""
    names = (path.name for path in root.iterdir() if _NAME.fullmatch(path.name))
    return tuple(
        sorted(
            name
            for name in names
            if name.startswith(TEMPORARY)
            or (not name.startswith(REPLACED) and not (root / name / _METADATA).is_file())
        )
    )


def read_metadata(root: Path, folder: Path) -> Metadata:
    """The torch DCP metadata of a folder of any format that is made of it, such as `torch_dist`.

    Raises ValueError if the folder is half-written, as `open_checkpoint` does.
    """
    return _read_metadata(root, folder)


def sync_files(paths: Iterable[Path]) -> None:
    """Forces the files to disk. torch's writer syncs before it flushes its own last buffer."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Forces the folder's list of names to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _has_content(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def is_checkpoint(folder: Path) -> bool:
    """Whether this is one checkpoint's folder, in our format or another's, and not a root."""
    patterns = (_METADATA, *(pattern for pattern, _, _ in _FOREIGN))
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def readable_metadata(folder: Path) -> Metadata:
    """The folder's metadata; empty if it cannot be read."""
    try:
        return _unpickled(folder.parent, folder)
    except ValueError:
        return Metadata({})


def require_ours(root: Path, folder: Path) -> None:
    """ValueError for a checkpoint of `root` that this release cannot read, which is not to be
    taken for a damaged one."""
    read_record(folder)
    for pattern, what, remedy in _FOREIGN:
        if next(folder.glob(pattern), None) is not None:
            raise ValueError(
                f"{folder} is {what}, not a checkpoint in the format fsdp_dtensor: {remedy}; "
                f"{_remedy(root)}"
            )


def _broken(root: Path, folder: Path, why: str) -> ValueError:
    return ValueError(f"{folder} is half-written: {why}; {_remedy(root)}")


def _unpickled(root: Path, folder: Path) -> Metadata:
    if not (folder / _METADATA).is_file():
        raise _broken(root, folder, "it has no .metadata file")
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        # pickle raises whatever the damaged bytes happen to spell
        why = f".metadata cannot be read ({type(error).__name__}: {error})"
        raise _broken(root, folder, why) from error
    if not isinstance(metadata, Metadata):
        why = f".metadata holds a {type(metadata).__name__}, not metadata of torch DCP"
        raise _broken(root, folder, why)
    return metadata


def _read_metadata(root: Path, folder: Path) -> Metadata:
    metadata = _unpickled(root, folder)
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        end = info.offset + info.length
        needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
    for name, size in sorted(needed.items()):
        path = folder / name
        if not path.is_file():
            raise _broken(root, folder, f"{name} is missing")
        if path.stat().st_size < size:
            raise _broken(root, folder, f"{name} has {path.stat().st_size} of {size} bytes")
    return metadata


def _remedy(root: Path) -> str:
    complete = complete_iterations(root)
    broken = half_written(root)
    options = ", ".join(map(str, complete[-5:]))
    parts = [
        f"complete in {root}: iteration {options} (name one to load it)"
        if complete
        else f"{root} has no complete checkpoint"
    ]
    if broken:
        parts.append(f"half-written, from a save that was interrupted: {', '.join(broken)}")
    return "; ".join(parts)


def _stale(root: Path, iteration: int, keep_last: int | None) -> list[Path]:
    leftovers = [
        path
        for path in root.iterdir()
        if (match := _NAME.fullmatch(path.name))
        # Megatron makes the final folder, empty, before it saves.
        and (match[1] or not _has_content(path))
        and int(match[2]) <= iteration
    ]
    # Those that are renamed before they are deleted come last: the name must be free by then.
    leftovers.sort(key=lambda path: not path.name.startswith((TEMPORARY, REPLACED)))
    if keep_last is None:
        return leftovers
    before = [i for i in complete_iterations(root) if i < iteration]
    kept = len(before) - (keep_last - 1)
    return leftovers + [final_folder(root, i) for i in before[: max(kept, 0)]]


def _delete(folders: Iterable[Path]) -> None:
    """Deletes the folders; each first loses its final name, so that no half of one bears it."""
    for folder in list(folders):
        doomed = folder
        if not folder.name.startswith((TEMPORARY, REPLACED)):
            doomed = temporary_name(folder)
            os.rename(folder, doomed)
        shutil.rmtree(doomed)
