"""The end of collectives that can never end by themselves."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d


def keep_groups() -> None:
    """Keeps all process groups until the process has ended. Those of gloo would wait, when they are
    deleted at the end, for the timeout of collectives that never end."""
    for group in list(c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def nccl_groups() -> list[tuple[Any, Any]]:
    """All process groups of NCCL, with their backends."""
    groups = []
    for group in list(c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                groups.append((group, backend))
    return groups


def is_destroying(thread_id: int) -> bool:
    """True if a thread destroys the default process group. That may never end while collectives do
    not, nor would an abort beside it."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_code.co_name == c10d.destroy_process_group.__name__:
            return frame.f_locals.get("group") in (None, c10d.GroupMember.WORLD)
        frame = frame.f_back
    return False


def abort(groups: Sequence[tuple[Any, Any]]) -> None:
    """Ends all collectives that run, as torch's `_abort_process_group` does it, which would also
    forget the groups."""
    _, first = groups[0]
    # Together: aborts of single communicators would wait for each other.
    first._group_start()
    for group, _ in reversed(groups):
        group.abort()
    first._group_end()
