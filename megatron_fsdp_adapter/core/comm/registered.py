"""Fixed buffers registered with NCCL, and gathers by copy engines.

Memory of NCCL's own allocator, registered with a communicator, lets NCCL move data in place without
copies through its internal buffers. Registered *symmetrically* (a window with the same offset on
every rank) and on a communicator with the policy of zero CTAs, an all-gather inside an NVLink
domain is peer copies by the copy engines: no streaming multiprocessor is taken from the matrix
products beside it. NCCL 2.28: https://docs.nvidia.com/deeplearning/nccl, "user buffer
registration".

Torch gives NCCL's allocator (`ProcessGroupNCCL.mem_allocator`) where the device has NVLink
multicast. NCCL's memory, and windows of it, need none, and an A100 or a GPU by itself has none.
There it comes from the NCCL that torch has loaded, through two functions of the kind that torch
takes, which a C compiler makes: Triton needs one as well. Functions of Python were turned down:
torch gives memory back when the interpreter may be gone.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
"""If memory cannot be had, `take` returns a null pointer, which torch reports as out of memory."""


def allocator_of(backend: Any) -> Any:
    """The allocator for a `torch.cuda.MemPool`. backend: of an NCCL group.

    Raises:
        RuntimeError: torch gives no allocator for this device, and compiling one failed.
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
    """The path of a shared library in `folder`: `SOURCE`, compiled and linked to `library`. Raises
    OSError without a compiler, and CalledProcessError if that fails."""
    made = folder / "allocator.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", str(library)]
    command += ["-o", str(made)]
    subprocess.run(command, input=SOURCE, text=True, check=True, capture_output=True)
    return made


def loaded_library(name: str, maps: Path = Path("/proc/self/maps")) -> Path:
    """The file of this process whose name begins with `name`; OSError if there is none."""
    for line in maps.read_text().splitlines():
        _, slash, rest = line.partition("/")
        path = Path(slash + rest)
        if path.name.startswith(name):
            return path
    raise OSError(f"no {name} is loaded")


def zero_cta_options() -> Any:
    """Options of an NCCL group whose collectives take no compute units where NCCL can do without:
    all-gathers of symmetric memory."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
    options.is_high_priority_stream = True
    return options


class RegisteredMemory:
    """Memory from NCCL's allocator, registered with the communicators of `groups`.

    Args:
        groups: process groups on the NCCL backend; every rank of one makes the same calls in the
            same order, since registering is collective.
        device: where the memory is.
        symmetric: register as a symmetric window; otherwise for this rank alone.
        at_once: `allocate` registers too. Otherwise the caller has to call `register`: registration
            may take long and should not delay the first step.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        symmetric: bool = True,
        at_once: bool = True,
    ) -> None:
        self.symmetric = symmetric
        self.at_once = at_once
        self.device = device
        self._groups = list(dict.fromkeys(groups))
        # One for each call of `allocate`. The memory is there as long as its pool.
        self._pools: list[Any] = []
        # Weak references to groups, and the pools that each one's communicator knows.
        self._registered: list[tuple[Any, Any]] = []
        weakref.finalize(self, _deregister, self._registered, self._pools)

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """uint8 tensors of `sizes` bytes, in one pool."""
        for group in self._groups:  # a communicator exists from its first collective on
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        backend: Any = self._groups[0]._get_backend(self.device)
        pool = torch.cuda.MemPool(allocator_of(backend))
        with torch.cuda.use_mem_pool(pool, device=self.device):
            memory = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        self._pools.append(pool)
        if self.at_once:
            self.register()
        return memory

    def register(self) -> None:
        """Registers what is not registered yet, in one batch. Collective over each group."""
        done = {id(pool) for _, pool in self._registered}
        torch.cuda.synchronize(self.device)
        for pool, group in itertools.product(self._pools, self._groups):
            if id(pool) not in done:
                backend: Any = group._get_backend(self.device)
                backend.register_mem_pool(pool, symm=self.symmetric)
                self._registered.append((weakref.ref(group), pool))


def _deregister(registered: list[tuple[Any, Any]], pools: list[Any]) -> None:
    """Deregisters all pools with the communicators that still exist, and forgets them.

    NCCL itself forgets the registrations of a communicator that is destroyed. Launched collectives
    are waited for first, such as a gather for a forward that never came: to them, memory that is no
    window any more is an illegal address."""
    if registered and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for ref, pool in registered:
        group = ref()
        if group is not None and dist.is_initialized():
            group._get_backend(torch.device("cuda")).deregister_mem_pool(pool)
    registered.clear()
    pools.clear()
