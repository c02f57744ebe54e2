"""The folders of a checkpoint root: their names, and the order of steps that makes a save safe.

    root/latest_checkpointed_iteration.txt   the tracker: number of the newest complete checkpoint
    root/iter_0000010/                       a complete checkpoint (torch DCP: .metadata, *.distcp)
    root/tmp.iter_0000010.5f0c2a91/          one being written; half-written if nobody writes it
    root/old.iter_0000010/                   the previous iter_0000010, while it is being replaced

A folder gets its final name only when all of it is on disk, the tracker is changed after that,
and what is replaced or pruned is deleted last. A process killed between any two steps leaves the
checkpoint that the tracker names loadable. Everything here is done by one process; the file
system is assumed to rename atomically. The two other names are prefixes because Megatron takes
every `iter_*` for a checkpoint and reads a number from what follows.

A temporary folder has a name that no other job has, so that two jobs which save the same iteration
(such as one that was preempted and still runs) never write into one folder. Whoever begins later
takes the other's folder away by renaming it, and the other's save ends in an error: an exclusive
lock was turned down, for a job that hangs would keep the one that replaces it from saving.

A file that is to replace another, such as the tracker, is written beside it under a name that tells
its process, and what a process that is gone left there is deleted; what lives is left alone. Were
it deleted too, each of two jobs could stop the other: one by the file, one by the folder. What a
process of another machine left is kept, some bytes, for nobody here can tell whether it is gone.
"""
from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_adapter.checkpoint import unpickling
from megatron_fsdp_adapter.checkpoint.coordination import CheckpointError
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
_NONCE = r"\.[0-9a-f]{8}"
_OWNER = r"\.([0-9a-f]{8})-([0-9]+)"
_NAME = re.compile(rf"(?:(old\.)?iter_(\d{{7,}})|(tmp\.)iter_(\d{{7,}})(?:{_NONCE})?)")


def final_folder(root: Path, iteration: int) -> Path:
    """Where the complete checkpoint of `iteration` lies, Megatron's name for it."""
    return root / f"iter_{iteration:07d}"


def fresh_name(path: Path) -> Path:
    """A temporary name for what will be `path`, or is no longer to be: another at each call."""
    return path.with_name(f"{TEMPORARY}{path.name}.{secrets.token_hex(4)}")


def owned_name(path: Path) -> Path:
    """The same, and the name tells which process this is."""
    return fresh_name(path.with_name(f"{path.name}.{_place()}-{os.getpid()}"))


def abandoned(path: Path) -> list[Path]:
    """What lies beside `path` under an owned name of a process that is gone."""
    owned = re.compile(rf"{re.escape(TEMPORARY + path.name)}{_OWNER}{_NONCE}")
    return [found for found in path.parent.iterdir()
            if owned.fullmatch(found.name) and _is_ownerless(found)]  # fmt: skip


def replaced_name(folder: Path) -> Path:
    """Where the previous `folder` waits while the new one takes its name."""
    return folder.with_name(REPLACED + folder.name)


def prepare_folder(folder: Path) -> Path:
    """Makes an empty temporary folder for `folder`, and returns it; undoes what a killed save of
    it left. The folder of a save that is not killed is taken away too: that save then fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    old = replaced_name(folder)
    if os.path.lexists(old):
        _give_name_back(folder)
    remove_or_warn([old, *_temporaries(folder)])
    temporary = fresh_name(folder)
    temporary.mkdir()
    return temporary


def rename_into_place(temporary: Path, folder: Path) -> None:
    """Gives the temporary folder, all of which is on disk, its final name.

    A complete checkpoint of that name becomes the replaced one, and is left to be deleted; an empty
    folder, as Megatron makes one before it saves, is overwritten. Raises CheckpointError if another
    job has taken one of the names; what was complete has its name again then.
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
        f"{temporary.name} or the final name; end one of the two, or give them different folders"
    )


def iteration_of(folder: Path) -> int | None:
    """The number in a final folder's name; None if it has none."""
    prefix, number = _parsed(folder)
    return None if prefix else number


def publish_without_tracker(temporary: Path, folder: Path) -> None:
    """Gives the temporary folder its name, and deletes what killed saves left. For Megatron's own
    saves, which write the tracker, and prune, themselves."""
    rename_into_place(temporary, folder)
    number = iteration_of(folder)
    if number is not None:
        _tidy(folder.parent, number, None)


def _tidy(root: Path, iteration: int, keep_last: int | None) -> None:
    """Deletes what is stale. A checkpoint of up to this iteration that a killed save left under its
    replaced name alone, which is complete, first gets its own name again."""
    for path in list(root.iterdir()):
        prefix, number = _parsed(path)
        if prefix == REPLACED and number is not None and number <= iteration and _is_taken(path):
            _give_name_back(final_folder(root, number))
    remove_or_warn(_stale(root, iteration, keep_last))


def _give_name_back(folder: Path) -> None:
    """Undoes the first rename of a save that was killed before its second."""
    if not _is_taken(folder):
        _rename(replaced_name(folder), folder)
        sync_folder(folder.parent)


def publish(root: Path, iteration: int, temporary: Path, keep_last: int | None) -> None:
    """Gives the temporary folder its name, then updates the tracker, then deletes what is stale.

    Stale are a checkpoint that was replaced, what killed saves of earlier iterations left, and with
    `keep_last` every complete checkpoint but this one and the keep_last - 1 nearest before it; of
    one that is a link the link alone is removed. What cannot be deleted is one warning: the new
    checkpoint is complete by then.
    """
    # The tracker's text is on disk first: a full disk must not leave a checkpoint without it.
    with replacing(root / TRACKER) as tracker:
        _write_synced(tracker, str(iteration))
        rename_into_place(temporary, final_folder(root, iteration))
    _tidy(root, iteration, keep_last)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file: whenever a process dies it has the text of before or all of the new one."""
    with replacing(path) as temporary:
        _write_synced(temporary, text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a name beside `path`; the file that is written there, and is on disk, takes the place
    of `path` when the block ends without error. What killed processes left there is deleted."""
    for left in _temporaries(path):
        if _is_ownerless(left):
            left.unlink(missing_ok=True)
    temporary = owned_name(path)
    try:
        yield temporary
        if not temporary.is_file():
            raise CheckpointError(f"{temporary} is gone: another job writes {path} too")
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
    return folder, read_metadata(root, folder)


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
    found = (number for p in root.iterdir() if (number := iteration_of(p)) is not None
             and (p / _METADATA).is_file())  # fmt: skip
    return tuple(sorted(found))


def half_written(root: Path) -> tuple[str, ...]:
    """Names of the folders that a killed save left."""
    return tuple(sorted(path.name for path in root.iterdir() if _is_half(path)))


def leftovers(root: Path) -> tuple[str, ...]:
    """Names of all that killed processes left: those folders, and trackers that were being written
    by a process that is gone."""
    trackers = (path.name for path in _temporaries(root / TRACKER) if _is_ownerless(path))
    return tuple(sorted((*half_written(root), *trackers)))


def _is_half(path: Path) -> bool:
    prefix, number = _parsed(path)
    if number is None or prefix == REPLACED:
        return False
    # A link that leads nowhere is not for us to explain.
    return prefix == TEMPORARY or (path.exists() and not (path / _METADATA).is_file())


def _parsed(path: Path) -> tuple[str, int | None]:
    """The prefix in a folder's name and its iteration; no iteration if it is another thing."""
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
    """Whether there is something under that name that is not to be overwritten. A link is, be what
    it leads to empty or on a disk that is not there."""
    return folder.is_symlink() or _has_content(folder)


def _rename(source: Path, target: Path) -> None:
    """Renames, over an empty folder too if what is renamed is a link."""
    if source.is_symlink() and target.is_dir():
        target.rmdir()
    os.rename(source, target)


def _temporaries(path: Path) -> list[Path]:
    """What lies beside `path` under one of its temporary names, that of earlier releases too."""
    name = re.compile(rf"{re.escape(TEMPORARY + path.name)}(?:{_OWNER})?(?:{_NONCE})?")
    return [found for found in path.parent.iterdir() if name.fullmatch(found.name)]


def _is_ownerless(temporary: Path) -> bool:
    """Whether the process in the file's name is gone. Earlier releases wrote no process there."""
    owner = re.search(rf"{_OWNER}{_NONCE}$", temporary.name)
    if owner is None:
        return True
    if owner[1] != _place():
        return False
    try:
        os.kill(int(owner[2]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    return False


def _place() -> str:
    """Where a process id names one process, in 8 digits: a machine, and in it a container."""
    namespace = Path("/proc/self/ns/pid")
    known = f"{socket.gethostname()} {os.readlink(namespace) if namespace.exists() else ''}"
    return f"{zlib.crc32(known.encode()):08x}"


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
        return unpickling.read_metadata(folder / _METADATA)
    except unpickling.RefusedName as error:
        raise ValueError(
            f"{folder} is not to be trusted: torch.distributed.checkpoint did not write its "
            f".metadata, since {error}; nothing of it was run"
        ) from error
    except OSError as error:
        raise _broken(root, folder, f".metadata cannot be read ({error})") from error
    except ValueError as error:
        raise ValueError(f"{folder} is damaged: {error}; {_remedy(root)}") from error
    except Exception as error:
        # pickle raises whatever the damaged bytes happen to spell
        why = f".metadata cannot be read ({type(error).__name__}: {error})"
        raise ValueError(f"{folder} is damaged: {why}; {_remedy(root)}") from error


def read_metadata(root: Path, folder: Path) -> Metadata:
    """The torch DCP metadata of a folder of any format that is made of it, such as `torch_dist`.

    Raises ValueError if the folder is half-written, as `open_checkpoint` does.
    """
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
    leftovers = []
    for path in root.iterdir():
        prefix, number = _parsed(path)
        # Megatron makes the final folder, empty, before it saves.
        if number is not None and number <= iteration and (prefix or not _is_taken(path)):
            leftovers.append(path)
    if keep_last is None:
        return leftovers
    before = [i for i in complete_iterations(root) if i < iteration]
    kept = len(before) - (keep_last - 1)
    return leftovers + [final_folder(root, i) for i in before[: max(kept, 0)]]


def _remove(path: Path) -> None:
    """A folder first loses its name: no half of one bears it, and a job that would give it its
    final name meanwhile cannot. What another process deletes at the same time is no error."""
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
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def remove_or_warn(paths: Iterable[Path]) -> None:
    """Deletes folders, and links without what they lead to. One warning lists what could not be
    deleted."""
    problems = []
    for path in paths:
        try:
            _remove(path)
        except OSError as error:
            problems.append(f"{path}: {error}")
    if problems:
        warnings.warn(
            "old checkpoints could not be deleted, and take up space:\n"
            + "\n".join(f"  {line}" for line in problems),
            stacklevel=3,
        )
