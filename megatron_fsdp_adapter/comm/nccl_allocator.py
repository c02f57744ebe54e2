"""NCCL's allocator, also where torch does not hand it out.

Torch gives it (`ProcessGroupNCCL.mem_allocator`) where the device has NVLink multicast. NCCL's
memory, and windows of it, need none, and an A100 or a GPU by itself has none. There it comes from
the NCCL that torch has loaded, through two functions of the kind that torch takes, which a C
compiler makes: Triton needs one as well.

Functions of Python were turned down: torch gives memory back when the interpreter may be gone.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

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
"""Memory that cannot be had is a null pointer, which torch reports as out of memory."""


def allocator_of(backend: Any) -> Any:
    """The allocator for a `torch.cuda.MemPool`. backend: that of an NCCL group.

    Raises:
        RuntimeError: torch hands out none, and none can be made.
    """
    try:
        return backend.mem_allocator
    except RuntimeError as refused:
        try:
            return _from_library()._allocator
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(
                "nccl_ub, fsdp_copy_engine_all_gather, fsdp_copy_engine_reduce_scatter: torch "
                f"has no allocator of NCCL on this device ({refused}), and compiling one failed "
                f"({error}). Put a C compiler (cc) on the PATH, or set the options to False"
            ) from refused


@functools.cache
def _from_library() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        made = compiled(loaded_library("libnccl.so"), Path(folder))
        return torch.cuda.memory.CUDAPluggableAllocator(str(made), "take", "give")


def compiled(library: Path, folder: Path) -> Path:
    """The functions of `SOURCE`, linked to `library`, in `folder`. OSError without a compiler,
    CalledProcessError where it fails."""
    made = folder / "allocator.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", str(library), "-o", str(made)],
        input=SOURCE, text=True, check=True, capture_output=True,
    )  # fmt: skip
    return made


def loaded_library(name: str, maps: Path = Path("/proc/self/maps")) -> Path:
    """The file of this process whose name begins with `name`; OSError if there is none."""
    for line in maps.read_text().splitlines():
        path = Path(line.partition("/")[1] + line.partition("/")[2])
        if path.name.startswith(name):
            return path
    raise OSError(f"no {name} is loaded")
