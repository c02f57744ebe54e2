"""Large host memory, whose pages are there when it is handed out.

The system gives a page when it is touched first, zeroes it then, and a page lock goes through all
of them. One thread takes a second for some GiB of small pages, and so does the lock. Large pages
are 512 times fewer, and several threads zero them at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

PART = 1 << 26
"""Bytes that a thread touches at a time."""

MAX_THREADS = 8


def host_pages(nbytes: int) -> torch.Tensor:
    """uint8, zero, in memory of its own."""
    if nbytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # advice: there may be none
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), -(-nbytes // PART))
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(torch.Tensor.zero_, memory.split(PART)):
            pass
    return memory
