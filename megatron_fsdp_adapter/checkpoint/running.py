"""The saves of this process, by which they leave each other alone.

A background save writes while training goes on, and the next save may be of another kind: a plain
one on SIGTERM, or by another `AsyncSaver`. Saves into one root take turns: each waits for the
background saves that were begun before it (`wait`). All ranks begin saves in the same order, and a
thread that writes waits for no other save, so turns cannot deadlock.

Some saves cannot wait for each other: one in a signal handler that interrupts another save of the
same thread; and Megatron writes the tracker of a background save some iterations after it is
written. So this process also knows its temporary folders, of which no save of its own deletes one,
and the order in which its saves were begun, in which the tracker goes.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
from concurrent.futures import Future
from pathlib import Path

_WRITES: dict[Future[None], str] = {}
"""Background saves that run, each with the path of its root."""

_FOLDERS: set[str] = set()
"""Names of temporary folders of saves that run. A name is unique to its save."""

_COUNT = itertools.count()
_BEGUN: dict[tuple[str, int], int] = {}
"""When a root's iteration was last begun to be saved, as a number that increases."""

_TRACKED: dict[str, tuple[int, int]] = {}
"""The save of this process that a root's tracker names: when it was begun, and its iteration."""

# A forked process has no thread that would finish its parent's saves.
os.register_at_fork(after_in_child=_WRITES.clear)


def add(write: Future[None], root: Path) -> None:
    """Lets later saves into `root` wait for `write`."""
    _WRITES[write] = os.path.realpath(root)
    write.add_done_callback(lambda done: _WRITES.pop(done, None))


def wait(root: Path) -> None:
    """Waits for this rank's background saves into `root`. Their errors are not raised."""
    path = os.path.realpath(root)
    concurrent.futures.wait([write for write, where in list(_WRITES.items()) if where == path])


def begin(root: Path, iteration: int | None) -> None:
    """Remembers that this process begins a save, before it waits for anything. iteration: None if
    its folder has no number."""
    if iteration is not None:
        _BEGUN[os.path.realpath(root), iteration] = next(_COUNT)


def write(temporary: Path) -> None:
    """Remembers the temporary folder of a save of this process."""
    _FOLDERS.add(temporary.name)


def end(temporary: Path) -> None:
    """Forgets a temporary folder: it is renamed, or its save has failed."""
    _FOLDERS.discard(temporary.name)


def is_running(temporary: Path) -> bool:
    """True if a save of this process writes into the folder of this name."""
    return temporary.name in _FOLDERS


def overtaken_by(root: Path, iteration: int) -> int | None:
    """The iteration that the tracker of `root` names, if that is a save of this process that was
    begun after the one of `iteration`; otherwise None."""
    path = os.path.realpath(root)
    begun = _BEGUN.get((path, iteration))
    if begun is None or path not in _TRACKED:
        return None
    of_tracker, named = _TRACKED[path]
    return named if begun < of_tracker else None


def tracked(root: Path, iteration: int) -> None:
    """Remembers that the tracker of `root` names this process's save of `iteration`."""
    path = os.path.realpath(root)
    if (path, iteration) in _BEGUN:
        _TRACKED[path] = _BEGUN[path, iteration], iteration
