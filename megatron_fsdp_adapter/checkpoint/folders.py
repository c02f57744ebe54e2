"""The folders of a checkpoint root: their names, and the order of steps that makes a save safe.

    root/latest_checkpointed_iteration.txt   the tracker: number of the newest complete checkpoint
    root/iter_0000010/                       a complete checkpoint (torch DCP: .metadata, *.distcp)
    root/iter_0000010.tmp/                   one being written; half-written if nobody writes it
    root/iter_0000010.old/                   the previous iter_0000010, while it is being replaced

A folder gets its final name only when all of it is on disk, the tracker is changed after that,
and what is replaced or pruned is deleted last. A process killed between any two steps leaves the
checkpoint that the tracker names loadable. Everything here is done by one process; the file
system is assumed to rename atomically.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

TRACKER = "latest_checkpointed_iteration.txt"
TEMPORARY, REPLACED = ".tmp", ".old"
_METADATA = ".metadata"
_NAME = re.compile(r"iter_(\d{7,})(\.tmp|\.old)?")


def final_folder(root: Path, iteration: int) -> Path:
    """Where the complete checkpoint of `iteration` lies, Megatron's name for it."""
    return root / f"iter_{iteration:07d}"


def temporary_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is written. The same on every rank, so not random."""
    return root / f"iter_{iteration:07d}{TEMPORARY}"


def replaced_folder(root: Path, iteration: int) -> Path:
    """Where the previous checkpoint of `iteration` waits while the new one takes its name."""
    return root / f"iter_{iteration:07d}{REPLACED}"


def prepare(root: Path, iteration: int) -> None:
    """Makes `root` and an empty temporary folder; undoes what a killed save of it left."""
    root.mkdir(parents=True, exist_ok=True)
    final, old = final_folder(root, iteration), replaced_folder(root, iteration)
    if old.exists() and not final.exists():
        os.rename(old, final)
        sync_folder(root)
    temporary = temporary_folder(root, iteration)
    _delete(path for path in (temporary, old) if path.exists())
    temporary.mkdir()


def publish(root: Path, iteration: int, keep_last: int | None) -> None:
    """Gives the temporary folder its name, then updates the tracker, then deletes what is stale.

    Stale are a replaced checkpoint, what killed saves of earlier iterations left, and with
    `keep_last` every complete checkpoint but this one and the keep_last - 1 nearest before it.
    """
    final, old = final_folder(root, iteration), replaced_folder(root, iteration)
    temporary = temporary_folder(root, iteration)
    sync_folder(temporary)
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    sync_folder(root)
    write_tracker(root, iteration)
    _delete(_stale(root, iteration, keep_last))


def write_tracker(root: Path, iteration: int) -> None:
    """Makes `iteration` the newest checkpoint of `root`, atomically."""
    temporary = root / f"{TRACKER}{TEMPORARY}"
    with temporary.open("w") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, root / TRACKER)
    sync_folder(root)


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

    A save killed exactly between its two renames leaves the previous checkpoint under its
    `.old` name only; that one is then opened. Raises FileNotFoundError if there is none, and
    ValueError if it is half-written: no readable .metadata, or a data file missing or too short.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"checkpoint folder {root} does not exist; check the load path")
    folder = final_folder(root, iteration)
    if not folder.exists() and replaced_folder(root, iteration).is_dir():
        folder = replaced_folder(root, iteration)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; {_remedy(root)}")
    return folder, _read_metadata(root, folder)


def complete_iterations(root: Path) -> tuple[int, ...]:
    """Numbers of the folders with a final name and a .metadata file, ascending."""
    found = (
        int(match[1])
        for path in root.iterdir()
        if (match := _NAME.fullmatch(path.name))
        and not match[2]
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
            if name.endswith(TEMPORARY)
            or (not name.endswith(REPLACED) and not (root / name / _METADATA).is_file())
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


def _read_metadata(root: Path, folder: Path) -> Metadata:
    def broken(why: str) -> ValueError:
        return ValueError(f"{folder} is half-written: {why}; {_remedy(root)}")

    if not (folder / _METADATA).is_file():
        raise broken("it has no .metadata file")
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        # pickle raises whatever the damaged bytes happen to spell
        raise broken(f".metadata cannot be read ({type(error).__name__}: {error})") from error
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
    for name, size in sorted(needed.items()):
        path = folder / name
        if not path.is_file():
            raise broken(f"{name} is missing")
        if path.stat().st_size < size:
            raise broken(f"{name} has {path.stat().st_size} of {size} bytes")
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
        if (match := _NAME.fullmatch(path.name)) and match[2] and int(match[1]) <= iteration
    ]
    if keep_last is None:
        return leftovers
    before = [i for i in complete_iterations(root) if i < iteration]
    kept = len(before) - (keep_last - 1)
    return leftovers + [final_folder(root, i) for i in before[: max(kept, 0)]]


def _delete(folders: Iterable[Path]) -> None:
    """Deletes the folders; each first loses its final name, so that no half of one bears it."""
    for folder in list(folders):
        doomed = folder
        if not folder.name.endswith((TEMPORARY, REPLACED)):
            doomed = folder.with_name(folder.name + TEMPORARY)
            os.rename(folder, doomed)
        shutil.rmtree(doomed)
