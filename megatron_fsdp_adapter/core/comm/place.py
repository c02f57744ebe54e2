"""The place of the program that a thread is in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

BLOCKS = {
    "gloo": {
        "barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor",
        "all_gather_single", "all_gather_object", "reduce_scatter", "reduce_scatter_tensor",
        "reduce_scatter_single", "all_to_all", "all_to_all_single",
    },
    "nccl": {"barrier", "all_gather_object"},
}  # fmt: skip
"""The functions of torch.distributed that return on no rank before all have called them, by
backend."""

PACKAGES = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,
)
"""Folders whose lines say nothing about the place in the user's program."""


def place_of(thread_id: int | None) -> tuple[str, str, Sequence[int]]:
    """The line that a thread is in, outside of torch and this package; and if it is in a collective
    of torch.distributed that returns when all ranks have called it, its name and those ranks."""
    frame = sys._current_frames().get(thread_id) if thread_id is not None else None
    collective = ""
    members: Sequence[int] = ()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == c10d.__file__:
            group = frame.f_locals.get("group") or dist.group.WORLD
            with contextlib.suppress(RuntimeError, ValueError, KeyError):
                backend = "nccl" if "nccl" in dist.get_backend_config(group) else "gloo"
                if code.co_name in BLOCKS[backend]:
                    collective = f"torch.distributed.{code.co_name}"
                    members = dist.get_process_group_ranks(group)
        elif not code.co_filename.startswith(PACKAGES):
            place = f"in {code.co_name} ({code.co_filename}:{frame.f_lineno})"
            return place, collective, members
        frame = frame.f_back
    return "", collective, members
