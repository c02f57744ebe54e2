"""The folders of a checkpoint root: their names, and the order of steps of a safe save.

    root/latest_checkpointed_iteration.txt   the tracker: number of the newest complete checkpoint
    root/iter_0000010/                       a complete checkpoint (torch DCP: .metadata, *.distcp)
    root/tmp.iter_0000010.5f0c2a91/          a running save, or the rest of a killed one
    root/old.iter_0000010/                   the previous iter_0000010, while it is replaced

A folder gets its final name once all of it is on disk. Then the tracker is updated, and replaced or
pruned folders are deleted last. A process killed between any two steps leaves the checkpoint that
the tracker names loadable. One process does all of this, and the file system is assumed to rename
atomically. `tmp.` and `old.` are prefixes because Megatron takes every `iter_*` for a checkpoint.

A temporary folder's name is unique to its job, so that two jobs that save the same iteration (such
as a preempted one that still runs) never write into one folder. The job that begins later renames
the other's folder, and the other's save raises. There is no exclusive lock: a job that hangs would
keep its replacement from saving.

A file that replaces another, such as the tracker, is first written beside it under a temporary
name of its own. No save deletes such a file of another job. Otherwise two jobs could stop each
other: one takes the folder, the other deletes the file. A process that is killed meanwhile leaves
the file: a few bytes.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_adapter.checkpoint import unpickling
from megatron_fsdp_adapter.checkpoint.coordination import CheckpointError
from megatron_fsdp_adapter.checkpoint.record import read_record

TRACKER = "latest_checkpointed_iteration.txt"
TEMPORARY = "tmp."
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
        "load it with Megatron and save it with --ckpt-format torch_dist",
    ),
    (
        "*.safetensors",
        "a folder of safetensors",
        "import it with Megatron-Bridge (AutoBridge.import_ckpt)",
    ),
)
"""Files that only other formats have: (pattern, format, remedy)."""
_NONCE = r"\.[0-9a-f]{8}"
_NAME = re.compile(rf"(?:(old\.)?iter_(\d{{7,}})|(tmp\.)iter_(\d{{7,}})(?:{_NONCE})?)")


def final_folder(root: Path, iteration: int) -> Path:
    """The final folder of the checkpoint of `iteration`, by Megatron's naming."""
    return root / f"iter_{iteration:07d}"


def fresh_name(path: Path) -> Path:
    """A new temporary name for a file or folder that will become `path`, or that is to be
    deleted."""
    return path.with_name(f"{TEMPORARY}{path.name}.{secrets.token_hex(4)}")


def replaced_name(folder: Path) -> Path:
    """The name of the previous `folder` while the new one takes its name."""
    return folder.with_name(REPLACED + folder.name)


def prepare_folder(folder: Path) -> Path:
    """Makes and returns an empty temporary folder for `folder`.

    Undoes the rename of a save that was killed between its renames, and deletes temporary folders
    of other saves into `folder`. If such a save still runs, it fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    old = replaced_name(folder)
    if os.path.lexists(old):
        _give_name_back(folder)
    remove_or_warn([old, *_temporaries(folder)])
    temporary = fresh_name(folder)
    temporary.mkdir()
    return temporary


def rename_into_place(temporary: Path, folder: Path) -> None:
    """Renames a complete temporary folder to its final name.

    A complete checkpoint of that name gets its replaced name, for the caller to delete. An empty
    folder, which Megatron makes before a save, is overwritten. Raises CheckpointError if another
    job has taken one of the names; a complete checkpoint then has its name again.
    """
    if not temporary.is_dir():
        raise taken_away(temporary, folder)
    replaced = False
    try:
        if _is_taken(folder):
            os.rename(folder, replaced_name(folder))
            replaced = True
        os.rename(temporary, folder)
    except OSError as error:
        if replaced and not _is_taken(folder):
            _rename(replaced_name(folder), folder)
        raise taken_away(temporary, folder) from error
    sync_folder(folder.parent)


def taken_away(temporary: Path, folder: Path) -> CheckpointError:
    """The error of a save into `folder` whose temporary folder another job has taken."""
    return CheckpointError(
        f"{folder} was not saved: another job saves to {folder.parent} too, and has taken "
        f"{temporary.name} or the final name; or the nodes of this job do not share the folder. "
        "End one of the two jobs, or give each its own folder, which all its nodes share"
    )


def iteration_of(folder: Path) -> int | None:
    """The number in a final folder's name; None if it has none."""
    prefix, number = _parsed(folder)
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


def publish_without_tracker(temporary: Path, folder: Path) -> None:
    """Renames the temporary folder and deletes the folders of killed saves.

    For Megatron's saves, which write the tracker and prune themselves."""
    rename_into_place(temporary, folder)
    number = iteration_of(folder)
    if number is not None:
        _tidy(folder.parent, number, None)


def _tidy(root: Path, iteration: int, keep_last: int | None) -> None:
    """Deletes the stale folders of `publish`.

    A killed save may have left a complete checkpoint of up to this iteration under its replaced
    name only. That one first gets its own name again."""
    for path in list(root.iterdir()):
        prefix, number = _parsed(path)
        if prefix == REPLACED and number is not None and number <= iteration and _is_taken(path):
            _give_name_back(final_folder(root, number))
    remove_or_warn(_stale(root, iteration, keep_last))


def _give_name_back(folder: Path) -> None:
    """Undoes the first rename of a save that was killed before its second rename."""
    if not _is_taken(folder):
        _rename(replaced_name(folder), folder)
        sync_folder(folder.parent)


def publish(root: Path, iteration: int, temporary: Path, keep_last: int | None) -> None:
    """Renames the temporary folder, then updates the tracker, then deletes stale folders.

    Stale are a replaced checkpoint, folders of killed saves of earlier iterations, and with
    `keep_last` every complete checkpoint except this one and the keep_last - 1 nearest before it.
    Of a link only the link is removed, never its target. A folder that cannot be deleted is a
    warning, because the new checkpoint is complete by then.
    """
    # The tracker's text is on disk first: a full disk must not leave a checkpoint without it.
    with replacing(root / TRACKER) as tracker:
        _write_synced(tracker, str(iteration))
        rename_into_place(temporary, final_folder(root, iteration))
    _tidy(root, iteration, keep_last)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file atomically: a killed process leaves either the old or the new text."""
    with replacing(path) as temporary:
        _write_synced(temporary, text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path`.

    The file that the block writes there, and syncs, replaces `path` when the block ends without
    error."""
    temporary = fresh_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_tracker(root: Path) -> int:
    """Number of the newest complete checkpoint.

    Raises FileNotFoundError without root or tracker, ValueError if the tracker holds no number.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"checkpoint folder {root} does not exist. Check the load path")
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
        raise FileNotFoundError(f"{folder} does not exist; {_remedy(root)}")
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
    """Names of the folders that a killed save left."""
    return tuple(sorted(path.name for path in root.iterdir() if _is_half(path)))


def _is_half(path: Path) -> bool:
    # True for a temporary folder, and for a final one without .metadata.
    prefix, number = _parsed(path)
    if number is None or prefix == REPLACED:
        return False
    # A broken link is not a half-written checkpoint.
    return prefix == TEMPORARY or (path.exists() and not (path / _METADATA).is_file())


def _parsed(path: Path) -> tuple[str, int | None]:
    """The prefix and the iteration in a folder's name; the iteration is None for other names."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return "", None
    return match[1] or match[3] or "", int(match[2] or match[4])


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


def _is_taken(folder: Path) -> bool:
    """True if `folder` must not be overwritten: it has content, or it is a link (whatever its
    target is)."""
    return folder.is_symlink() or _has_content(folder)


def _rename(source: Path, target: Path) -> None:
    """Renames `source`, which may be a link, over an empty folder too."""
    if source.is_symlink() and target.is_dir():
        target.rmdir()
    os.rename(source, target)


def _temporaries(folder: Path) -> list[Path]:
    """Folders beside `folder` under its temporary names, including those of earlier releases."""
    name = re.compile(rf"{re.escape(TEMPORARY + folder.name)}(?:{_NONCE})?")
    return [found for found in folder.parent.iterdir() if name.fullmatch(found.name)]


def require_ours(root: Path, folder: Path, also: str | None = None) -> None:
    """Raises ValueError for a checkpoint of `root` in a format that this release does not read. It
    is not damaged. also: a pattern of `_FOREIGN` that is read here."""
    read_record(folder)
    for pattern, what, remedy in _FOREIGN:
        if pattern != also and next(folder.glob(pattern), None) is not None:
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
        return unpickling.read_metadata(folder / _METADATA)
    except unpickling.RefusedName as error:
        raise ValueError(
            f"{folder} is not trusted: its .metadata has content that "
            f"torch.distributed.checkpoint does not write ({error}). Nothing in it was executed"
        ) from error
    except ValueError as error:
        raise ValueError(f"{folder} is damaged: {error}; {_remedy(root)}") from error
    except Exception as error:
        # pickle may raise any error on damaged bytes
        why = f".metadata cannot be read ({type(error).__name__}: {error})"
        raise ValueError(f"{folder} is damaged: {why}; {_remedy(root)}") from error


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


def _remedy(root: Path) -> str:
    # The end of an error's text: the checkpoints of `root` that can be loaded instead.
    complete = complete_iterations(root)
    broken = half_written(root)
    if complete:
        options = ", ".join(map(str, complete[-5:]))
        remedy = f"complete in {root}: iteration {options} (name one to load it)"
    else:
        remedy = f"{root} has no complete checkpoint"
    if broken:
        remedy += f"; half-written, from a save that was interrupted: {', '.join(broken)}"
    return remedy


def _stale(root: Path, iteration: int, keep_last: int | None) -> list[Path]:
    # The folders that `publish` deletes after a save of `iteration`.
    leftovers = []
    for path in root.iterdir():
        prefix, number = _parsed(path)
        # Megatron makes the final folder, empty, before it saves.
        if number is not None and number <= iteration and (prefix or not _is_taken(path)):
            leftovers.append(path)
    if keep_last is None:
        return leftovers
    before = [i for i in complete_iterations(root) if i < iteration]
    surplus = len(before) - (keep_last - 1)
    pruned = before[: max(surplus, 0)]
    return leftovers + [final_folder(root, i) for i in pruned]


def _remove(path: Path) -> None:
    """Deletes a file or folder.

    A folder is renamed first: a half-deleted folder then never has the name, and no other job can
    rename it meanwhile. Concurrent deletion by another process is no error."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    _, number = _parsed(path)
    doomed = fresh_name(path if number is None else final_folder(path.parent, number))
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, onerror=_unless_gone)


def _unless_gone(_: Any, __: str, info: Any) -> None:
    # The error handler of `shutil.rmtree`: raises the error unless something is gone already.
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def remove_or_warn(paths: Iterable[Path]) -> None:
    """Deletes folders, and links without their targets. One warning lists those that could not be
    deleted."""
    problems = []
    for path in paths:
        try:
            _remove(path)
        except OSError as error:
            problems.append(f"{path}: {error}")
    if problems:
        listed = "\n".join(f"  {line}" for line in problems)
        warnings.warn(
            f"old checkpoints could not be deleted. Delete them to free their space:\n{listed}",
            stacklevel=3,
        )
