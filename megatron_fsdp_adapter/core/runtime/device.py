"""Streams, events and storage behind one interface, so that the engine is one code path.

The engine speaks of *roles* instead of streams: ``compute`` (whatever stream is current
when the call is made), ``gather`` and ``reduce``, and where the optimizer is offloaded ``load``,
``update`` and ``store``. Work is handed to a role with `submit` and ordered between roles with
`record` and `wait`; nothing else orders it.

On CUDA a role is a stream. On the host a role is a queue: a collective that was handed to it runs
in the background, what was submitted behind it is deferred until that collective has finished,
and `wait("compute", event)` drains the queue up to the event. The same program text therefore
overlaps communication with compute on both. The alternative, a null stream that runs everything
inline, was rejected: gloo would then never overlap and host runs would be slower than stock DDP.

Large host memory has all of its pages when it is handed out. The system gives a page when it is
first touched, and zeroes it then; a page lock goes through all pages. One thread takes a second for
some GiB of small pages, and so does the lock. So large pages are asked for, which are 512 times
fewer, and several threads touch them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .wait_timer import WaitTimer

COMPUTE = "compute"
GATHER = "gather"
REDUCE = "reduce"
LOAD = "load"
STORE = "store"
"""Copies from host memory and to it: two, as a bus carries both directions at once."""
UPDATE = "update"
"""Updates of what was loaded."""
ROLES = (COMPUTE, GATHER, REDUCE, LOAD, UPDATE, STORE)

Works = Iterable[Any] | None
"""Return type of a submitted function: `torch.distributed.Work` handles that are still running."""


class Runtime(Protocol):
    """The device as the engine uses it. A method with a body here does what the host needs; that is
    correct wherever work runs in the order in which it is submitted.

    Attributes:
        poison: storage is filled with NaN when it is handed out, so that a read before a write
            becomes NaN.
        host_waits: the host waits wherever compute does, so that results are there.
        timer: measures waits of compute, if there is one.
        on_out_of_memory: gets the label and tensor of a buffer that could not be allocated, and the
            error. May raise one that says more.
    """

    device: torch.device
    poison: bool = False
    host_waits: bool
    timer: WaitTimer | None = None
    on_out_of_memory: Callable[[str, torch.Tensor, RuntimeError], None] = staticmethod(
        lambda *_: None
    )

    def submit(self, role: str, *tasks: Callable[[], Works]) -> None:
        """Runs `tasks` with `role`'s stream current, after everything submitted to it before."""

    def launch(
        self, role: str, collective: Callable[[], Works], *tasks: Callable[[], Works]
    ) -> None:
        """Like `submit` of `collective` and `tasks`. The collective needs no result of work that
        was submitted before it: on the host it starts now, and not when that work is waited for."""
        self.submit(role, collective, *tasks)

    def record(self, role: str) -> Any:
        """An event that has happened when all work submitted to `role` so far has finished."""

    def wait(self, role: str, event: Any) -> None:
        """Work submitted to `role` from now on starts after `event`. On CUDA the host does not
        block. On the host it does, unless the event is of the same role and runtime."""

    def follow(self, role: str, other: str) -> None:
        """Work submitted to `role` from now on starts after all that was submitted to `other` so
        far."""
        self.wait(role, self.record(other))

    def free(self, role: str, *tasks: Callable[[], None]) -> None:
        """Like `submit`. The tasks only release storage that was allocated under `role`."""
        self.submit(role, *tasks)

    def allocate(self, flat: torch.Tensor) -> None:
        """Gives the released 1-D tensor `flat` its storage, on the current stream, which the
        caching allocator orders. Contents are undefined."""
        storage = flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(flat.nbytes)
            if self.poison:
                fill_with_nan(flat)

    def release(self, flat: torch.Tensor) -> None:
        """Returns the storage of the 1-D tensor `flat` to the allocator; views stay valid objects
        and see the next storage."""
        flat.untyped_storage().resize_(0)

    def synchronize(self) -> None:
        """Blocks the host until every role is idle."""

    def abandon(self) -> None:
        """Forgets what was submitted and has not started."""

    def fetch(self, tensor: torch.Tensor) -> Callable[[], Any]:
        """Starts to copy a tensor to the host, on the current stream. Returns a function that waits
        for the copy and gives the elements, as `tolist` does."""
        return tensor.tolist

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """uint8, zero, in host memory that copies to and from the device need not wait for."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def block(self, event: Any) -> None:
        """Blocks the host until `event` has happened."""
        self.wait(COMPUTE, event)

    def is_capturing(self) -> bool:
        """True if what is submitted goes into a CUDA graph."""
        return False


StreamId = tuple[int, int, int]
"""A stream's key in torch: number, index and type of its device."""


def stream_id(stream: torch.cuda.Stream) -> StreamId:
    return stream.stream_id, stream.device_index, stream.device_type


def current_stream_id(index: int) -> StreamId:
    """The id of the current stream of device number `index`."""
    return torch._C._cuda_getCurrentStream(index)  # type: ignore[no-any-return]


def set_stream_id(stream: StreamId) -> None:
    """Makes a stream the current one, as `torch.cuda.set_stream` does by a stream's object."""
    number, device_index, device_type = stream
    torch._C._cuda_setStream(stream_id=number, device_index=device_index, device_type=device_type)


def fill_with_nan(flat: torch.Tensor) -> None:
    """Makes every element of the contiguous `flat` NaN, whatever its dtype: all bits set are NaN in
    each floating-point format that has one."""
    flat.view(torch.uint8).fill_(0xFF)


def storage_bytes(flat: torch.Tensor) -> int:
    """Bytes of `flat`'s storage at this moment: 0 when released."""
    return flat.untyped_storage().nbytes()


HURRIED = (GATHER, REDUCE, UPDATE)
"""Roles that others wait for."""


class CudaRuntime(Runtime):
    """Roles are CUDA streams; gather, reduce and update run at high priority.

    High priority lets NCCL's few thread blocks get their streaming multiprocessors while a large
    GEMM still has blocks to launch; without it a collective waits for the tail of the GEMM. An
    update keeps a gather and the next load waiting.
    """

    host_waits = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Of every role but `COMPUTE`.
        self._streams: dict[str, torch.cuda.Stream] = {}
        for role in ROLES:
            if role != COMPUTE:
                priority = -1 if role in HURRIED else 0
                self._streams[role] = torch.cuda.Stream(device=device, priority=priority)
        # torch looks a number up several times faster than a `torch.device`.
        self._index = torch.cuda.current_device() if device.index is None else device.index
        # Of the same roles, what `set_stream_id` takes.
        self._ids = {role: stream_id(stream) for role, stream in self._streams.items()}
        # Objects of streams that have been current, by their ids.
        self._seen: dict[StreamId, torch.cuda.Stream] = {}
        # The event of `follow`. A wait stays on what was recorded before it, so one serves all.
        self._between = torch.cuda.Event()

    def _stream(self, role: str) -> torch.cuda.Stream:
        return self._current()[1] if role == COMPUTE else self._streams[role]

    def _current(self) -> tuple[StreamId, torch.cuda.Stream]:
        """The current stream, with its id. Objects are kept: making one is slower than using it."""
        known = current_stream_id(self._index)
        stream = self._seen.get(known)
        if stream is None:
            stream = torch.cuda.current_stream(self._index)
            self._seen[known] = stream
        return known, stream

    def submit(self, role: str, *tasks: Callable[[], Works]) -> None:
        if role == COMPUTE:
            for task in tasks:
                task()
            return
        # Faster than `torch.cuda.stream`, which asks for devices on the way in and out.
        current = current_stream_id(self._index)
        set_stream_id(self._ids[role])
        try:
            for task in tasks:
                task()
        finally:
            set_stream_id(current)

    def free(self, role: str, *tasks: Callable[[], None]) -> None:
        # The allocator returns a block to the stream that it was allocated on, whichever is
        # current. But poisoning fills what is released, which has to run on the role's stream.
        self.submit(role if self.poison else COMPUTE, *tasks)

    def record(self, role: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(role))
        return event

    def wait(self, role: str, event: torch.cuda.Event) -> None:
        stream = self._stream(role)
        if self.timer is not None and role == COMPUTE:
            with self.timer.wait():
                stream.wait_event(event)
        else:
            stream.wait_event(event)

    def follow(self, role: str, other: str) -> None:
        self._between.record(self._stream(other))
        self.wait(role, self._between)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def abandon(self) -> None:
        """Nothing: what is submitted is enqueued at once."""

    def fetch(self, tensor: torch.Tensor) -> Callable[[], Any]:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> Any:
            copied.synchronize()
            return copy.tolist()

        return read

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return pinned(nbytes)

    def block(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


PART = 1 << 26
"""Bytes that a thread touches at a time."""

MAX_THREADS = 8


def host_pages(nbytes: int) -> torch.Tensor:
    """uint8, zero, in memory of its own, whose pages are all there."""
    if nbytes == 0:
        return torch.zeros(0, dtype=torch.uint8, device="cpu")
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # advice: there may be none
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), -(-nbytes // PART))
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(torch.Tensor.zero_, memory.split(PART)):
            pass  # only for the error of a thread, which is raised here
    return memory


def pinned(nbytes: int) -> torch.Tensor:
    """uint8, zero, in page-locked host memory.

    It is locked for as long as the returned object lives: a view keeps the bytes, and not the lock.
    Existing pages are locked: torch's `pin_memory=True` would round the bytes up to a power of two.
    Raises RuntimeError if the system does not lock so many bytes.
    """
    memory = host_pages(nbytes)
    if nbytes > 0:
        runtime = torch.cuda.cudart()
        portable = 1
        address = memory.data_ptr()
        failed = int(runtime.cudaHostRegister(address, nbytes, portable))
        if failed:
            raise RuntimeError(
                f"{nbytes} bytes of host memory could not be page-locked (CUDA error {failed}). "
                "Offload less, or raise the limit of locked memory (ulimit -l)"
            )
        unlock = weakref.finalize(memory, runtime.cudaHostUnregister, address)
        unlock.atexit = False
    return memory


@dataclass(frozen=True)
class HostEvent:
    """It has happened when the first `position` items that were ever queued on `role` of `runtime`
    have finished. The runtime may be another model chunk's."""

    role: str
    position: int
    runtime: HostRuntime


HostQueue = deque[Callable[[], Works] | list[Any]]


class HostRuntime(Runtime):
    """Roles are queues in front of background collectives (gloo)."""

    host_waits = True

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device if device is not None else torch.device("cpu")
        # By role, all items from the first that is not known to have finished: the handles of one
        # that has started, the function of one that has not.
        self._queues: dict[str, HostQueue] = {role: deque() for role in ROLES}
        # By role, how many have left its queue.
        self._finished = dict.fromkeys(ROLES, 0)

    def submit(self, role: str, *tasks: Callable[[], Works]) -> None:
        queue = self._queues[role]
        for task in tasks:
            if queue:
                queue.append(task)
            else:
                self._begin(role, task)

    def launch(
        self, role: str, collective: Callable[[], Works], *tasks: Callable[[], Works]
    ) -> None:
        self._begin(role, collective)
        self.submit(role, *tasks)

    def _begin(self, role: str, task: Callable[[], Works]) -> None:
        works = list(task() or ())
        if works or self._queues[role]:
            self._queues[role].append(works)
        else:
            self._finished[role] += 1

    def record(self, role: str) -> HostEvent:
        return HostEvent(role, self._finished[role] + len(self._queues[role]), self)

    def wait(self, role: str, event: HostEvent) -> None:
        # Only the host thread can start work, so an order between two background queues is kept
        # by finishing the first one's part here.
        if role == event.role and event.runtime is self:
            return
        if self.timer is not None and role == COMPUTE:
            with self.timer.wait():
                event.runtime._drain(event.role, event.position)
        else:
            event.runtime._drain(event.role, event.position)

    def _drain(self, role: str, position: int) -> None:
        queue = self._queues[role]
        while self._finished[role] < position:
            head = queue[0]
            if callable(head):
                # The handles replace the function: if the wait is interrupted, the next one must
                # not start the work again.
                head = list(head() or ())
                queue[0] = head
            for work in head:
                work.wait()
            queue.popleft()
            self._finished[role] += 1

    def synchronize(self) -> None:
        for role in ROLES:
            self._drain(role, self.record(role).position)

    def abandon(self) -> None:
        # At the same line of the program every rank has the same queues, so all leave out the same
        # collectives. Collectives that run keep their tensors alive.
        for role, queue in self._queues.items():
            self._finished[role] += len(queue)
            queue.clear()


def make_runtime(device: torch.device) -> Runtime:
    """`CudaRuntime` for a CUDA device, `HostRuntime` for the CPU; ValueError for any other."""
    if device.type == "cuda":
        return CudaRuntime(device)
    if device.type == "cpu":
        return HostRuntime(device)
    raise ValueError(f"device={device}: only 'cuda' and 'cpu' devices are supported")
