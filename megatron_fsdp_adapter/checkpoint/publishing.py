"""The order of steps of a safe save, and the deletion of what is stale.

A folder gets its final name once all of it is on disk. Then the tracker is updated, and replaced or
pruned folders are deleted last. A process killed between any two steps leaves the checkpoint that
the tracker names loadable. One process does all of this, and the file system is assumed to rename
atomically. Names: `folders.py`.

A temporary folder's name is unique to its job, so that two jobs that save the same iteration (such
as a preempted one that still runs) never write into one folder. The job that begins later renames
the other's folder, and the other's save raises. There is no exclusive lock: a job that hangs would
keep its replacement from saving.

Two jobs may rename at any moment. A rename never overwrites a folder with content, so only a
deletion loses a checkpoint. A replaced one is deleted only while another has its name, and an empty
folder only by a call that deletes nothing else.

Saves of one process leave each other's temporary folders alone (`running.py`).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_fsdp_adapter.checkpoint import running
from megatron_fsdp_adapter.checkpoint.atomic import (
    TEMPORARY,
    fresh_name,
    replacing,
    sync_folder,
    write_atomically,
    write_synced,
)
from megatron_fsdp_adapter.checkpoint.coordination import CheckpointError
from megatron_fsdp_adapter.checkpoint.folders import (
    NONCE,
    REPLACED,
    TRACKER,
    complete_iterations,
    final_folder,
    is_complete,
    is_taken,
    iteration_of,
    parsed,
    read_tracker,
    replaced_name,
)

_ATTEMPTS = 5
"""Number of times that a save tries its two renames, if another job renames meanwhile."""
_RACED = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Errors of a rename whose source or target another job has renamed meanwhile."""


def prepare_folder(folder: Path) -> Path:
    """Makes and returns an empty temporary folder for `folder`; `discard` deletes it.

    Undoes the rename of a save that was killed between its renames, and deletes temporary folders
    that other jobs have for `folder`. If such a save still runs, it fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _give_name_back(folder)
    leftovers = [found for found in _temporaries(folder) if not running.is_running(found)]
    if is_complete(folder):
        leftovers.append(replaced_name(folder))
    remove_or_warn(leftovers)
    temporary = fresh_name(folder)
    running.write(temporary)
    try:
        temporary.mkdir()
    except BaseException:
        running.end(temporary)
        raise
    return temporary


def discard(temporary: Path) -> None:
    """Deletes the temporary folder of a failed save. One that cannot be deleted is a warning,
    because the caller raises the save's error."""
    running.end(temporary)
    remove_or_warn([temporary])


def rename_into_place(temporary: Path, folder: Path) -> None:
    """Renames a complete temporary folder to its final name.

    A complete checkpoint of that name gets its replaced name, for the caller to delete. An empty
    folder, which Megatron makes before a save, is overwritten. After an error a complete checkpoint
    has its name again. Raises CheckpointError if another job has taken the temporary folder, and
    OSError if a rename fails for another reason.
    """
    for attempt in range(_ATTEMPTS):
        try:
            _put_aside(folder)
            os.rename(temporary, folder)
            break
        except OSError as error:
            _give_name_back(folder)
            if not temporary.is_dir():
                raise taken_away(temporary, folder) from error
            if error.errno not in _RACED or attempt == _ATTEMPTS - 1:
                raise
    running.end(temporary)


def _put_aside(folder: Path) -> None:
    """Frees the name of a folder with content."""
    if not is_taken(folder):
        return
    old = replaced_name(folder)
    if not os.path.lexists(old):
        os.rename(folder, old)
    elif is_complete(folder):
        remove(old)
        os.rename(folder, old)
    else:
        # The complete checkpoint is `old`, and `folder` a rest of another program.
        remove(folder)


def taken_away(temporary: Path, folder: Path) -> CheckpointError:
    """The error of a save into `folder` whose temporary folder is gone."""
    return CheckpointError(
        f"{folder} was not saved: its temporary folder {temporary.name} is gone (another job saves "
        f"to {folder.parent} too, something else has deleted it, or the nodes of this job do not "
        "share the folder). End one of two such jobs, or give each its own folder, which all its "
        "nodes share"
    )


def publish_without_tracker(temporary: Path, folder: Path) -> None:
    """Renames the temporary folder and deletes the folders of killed saves.

    For Megatron's saves, which write the tracker and prune themselves. Raises as `publish` does."""
    rename_into_place(temporary, folder)
    try:
        sync_folder(folder.parent)
    except OSError as error:
        raise _not_confirmed(folder, error) from error
    number = iteration_of(folder)
    if number is not None:
        _tidy(folder.parent, number, None)


def publish(root: Path, iteration: int, temporary: Path, keep_last: int | None) -> None:
    """Renames the temporary folder, then updates the tracker, then deletes stale folders.

    Stale are a replaced checkpoint, folders of killed saves of earlier iterations, and with
    `keep_last` every complete checkpoint except this one and the keep_last - 1 nearest before it.
    Of a link only the link is removed, never its target. A folder that cannot be deleted is a
    warning, because the new checkpoint is complete by then.

    Raises CheckpointError if the checkpoint is complete and could not be confirmed.
    """
    folder = final_folder(root, iteration)
    if running.overtaken_by(root, iteration) is not None:
        publish_without_tracker(temporary, folder)
        return
    in_place = False
    try:
        # The tracker's text is on disk first: a full disk must not leave a checkpoint without it.
        with replacing(root / TRACKER) as tracker:
            write_synced(tracker, str(iteration))
            rename_into_place(temporary, folder)
            in_place = True
            sync_folder(root)
        tracker_names(root, iteration)
    except OSError as error:
        if in_place:
            raise _not_confirmed(folder, error) from error
        raise
    _tidy(root, iteration, keep_last)


def tracker_names(root: Path, iteration: int) -> None:
    """Remembers that the tracker names `iteration`; or lets it name a save that has overtaken this
    one, in a signal handler, while the tracker was replaced."""
    later = running.overtaken_by(root, iteration)
    if later is None:
        running.tracked(root, iteration)
    else:
        write_atomically(root / TRACKER, str(later))


def _not_confirmed(folder: Path, error: OSError) -> CheckpointError:
    """The error of a save that has failed after the checkpoint was in place."""
    return CheckpointError(
        f"{folder} is complete, but the save failed after that ({error}). A load takes the "
        f"checkpoint that {folder.parent / TRACKER} names, unless another iteration is given"
    )


def _tidy(root: Path, iteration: int, keep_last: int | None) -> None:
    """Deletes the stale folders of `publish`; an error is a warning.

    A killed save may have left a complete checkpoint of up to this iteration under its replaced
    name only. That one first gets its own name again."""
    try:
        for path in list(root.iterdir()):
            prefix, number = parsed(path)
            if number is None or number > iteration:
                continue
            if prefix == REPLACED and is_taken(path):
                _give_name_back(final_folder(root, number))
            elif not prefix and not is_taken(path):
                # Megatron makes the final folder, empty, before it saves. Another job may put a
                # checkpoint there meanwhile: then this fails.
                with suppress(OSError):
                    path.rmdir()
        stale = _stale(root, iteration, keep_last)
    except OSError as error:
        warnings.warn(f"{root}: old checkpoints could not be looked for ({error})", stacklevel=2)
        return
    remove_or_warn(stale)


def _give_name_back(folder: Path) -> None:
    """Undoes the first rename of a save that was killed before its second rename."""
    if is_taken(folder) or not os.path.lexists(replaced_name(folder)):
        return
    try:
        _rename(replaced_name(folder), folder)
    except OSError as error:
        if error.errno not in _RACED:
            raise
    else:
        sync_folder(folder.parent)


def _rename(source: Path, target: Path) -> None:
    """Renames `source`, which may be a link, over an empty folder too."""
    if source.is_symlink() and target.is_dir():
        target.rmdir()
    os.rename(source, target)


def _temporaries(folder: Path) -> list[Path]:
    """Folders beside `folder` under its temporary names, including those of earlier releases."""
    name = re.compile(rf"{re.escape(TEMPORARY + folder.name)}(?:{NONCE})?")
    return [found for found in folder.parent.iterdir() if name.fullmatch(found.name)]


def _stale(root: Path, iteration: int, keep_last: int | None) -> list[Path]:
    # The folders that `publish` deletes after a save of `iteration`.
    leftovers = []
    for path in root.iterdir():
        prefix, number = parsed(path)
        if number is None or number > iteration:
            continue
        if prefix == TEMPORARY and not running.is_running(path):
            leftovers.append(path)
        if prefix == REPLACED and is_complete(final_folder(root, number)):
            leftovers.append(path)
    if keep_last is None:
        return leftovers
    return leftovers + surplus(root, keep_last - 1, iteration)


def surplus(root: Path, kept: int, before: int | None = None) -> list[Path]:
    """The complete checkpoints except the newest `kept` and the one that the tracker names.

    before: only those of earlier iterations than this one are counted, and returned."""
    found = [i for i in complete_iterations(root) if before is None or i < before]
    old = found[: max(len(found) - kept, 0)]
    return [final_folder(root, i) for i in old if i != tracked(root)]


def tracked(root: Path) -> int | None:
    """The iteration that the tracker names; None if there is no tracker, or it names a release."""
    try:
        return read_tracker(root)
    except (FileNotFoundError, ValueError):
        return None


def remove(path: Path) -> None:
    """Deletes a file or folder.

    A folder is renamed first: a half-deleted folder then never has the name, and no other job can
    rename it meanwhile. Concurrent deletion by another process is no error."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    prefix, number = parsed(path)
    final = path if number is None else final_folder(path.parent, number)
    doomed = fresh_name(final)
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    if prefix == REPLACED and not is_taken(final):
        # Another job has put it aside since this one looked, and its own is not in place yet.
        os.rename(doomed, path)
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
            remove(path)
        except OSError as error:
            problems.append(f"{path}: {error}")
    if problems:
        listed = "\n".join(f"  {line}" for line in problems)
        warnings.warn(
            f"folders could not be deleted. Delete them to free their space:\n{listed}",
            stacklevel=3,
        )
