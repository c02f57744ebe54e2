"""Several ranks on one GPU, for tests of what ranks compute on machines that have no second one.

NCCL from 2.31 on allows that where `NCCL_MULTI_RANK_GPU_ENABLE=1` says so; a newer one than torch
brings is preloaded (docs/matrix.md). The ranks take turns on the device, so that no time means
anything. Torch hands out NCCL's allocator only where the device has NVLink multicast, which a
GPU by itself may not have: here it is taken from the library, by eight lines of C that the
compiler which Triton needs anyway makes.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WANTED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
PATIENCE = 3.0 if WANTED else 1.0
"""By what limits of time are multiplied."""

SOURCE = """
#include <sys/types.h>
int ncclMemAlloc(void **memory, size_t size);
int ncclMemFree(void *memory);
void *take(ssize_t size, int device, void *stream) {
  void *memory = 0;
  return ncclMemAlloc(&memory, (size_t)size) ? 0 : memory;
}
void give(void *memory, ssize_t size, int device, void *stream) { ncclMemFree(memory); }
"""


def devices() -> int:
    """How many GPUs tests may count on."""
    found = torch.cuda.device_count()
    return max(found, 8) if found and WANTED else found


@functools.cache
def _allocator() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "allocator.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)],
            input=SOURCE, text=True, check=True,
        )  # fmt: skip
        return torch.cuda.memory.CUDAPluggableAllocator(str(library), "take", "give")


def among_ranks(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` of one of the ranks on a device."""
    dist.ProcessGroupNCCL.mem_allocator = property(  # type: ignore[assignment]
        lambda backend: _allocator()._allocator
    )
    return fn(*args)


def prepared(fn: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """What ranks run in place of `fn`."""
    return functools.partial(among_ranks, fn) if WANTED and backend == "nccl" else fn
