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

_TRACKED: dict[str, int] = {}
"""When the save was begun that a root's tracker names, for saves of this process."""

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


def begin(temporary: Path, iteration: int | None) -> None:
    """Remembers a save of this process and its temporary folder. iteration: None if its final name
    has no number."""
    _FOLDERS.add(temporary.name)
    if iteration is not None:
        _BEGUN[os.path.realpath(temporary.parent), iteration] = next(_COUNT)


def end(temporary: Path) -> None:
    """Forgets a temporary folder: it is renamed, or its save has failed."""
    _FOLDERS.discard(temporary.name)


def is_running(temporary: Path) -> bool:
    """True if a save of this process writes into the folder of this name."""
    return temporary.name in _FOLDERS


def is_overtaken(root: Path, iteration: int) -> bool:
    """True if the tracker of `root` names a save of this process that was begun after the one of
    `iteration`."""
    path = os.path.realpath(root)
    begun = _BEGUN.get((path, iteration))
    return begun is not None and begun < _TRACKED.get(path, -1)


def tracked(root: Path, iteration: int) -> None:
    """Remembers that the tracker of `root` names this process's save of `iteration`."""
    path = os.path.realpath(root)
    if (path, iteration) in _BEGUN:
        _TRACKED[path] = _BEGUN[path, iteration]
