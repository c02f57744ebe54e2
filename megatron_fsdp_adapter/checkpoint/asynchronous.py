"""Background saves.

A save copies this rank's part of the state to the host, and torch DCP plans and writes the copy in
a thread. Training waits only for the copy. The thread's collectives run on a
separate group: on the training group their order would differ between ranks.

Memory: one copy of this rank's state (page-locked for GPU tensors), allocated at the first save and
reused by the next. There is never a second copy, because a save waits for the previous one.

DCP's `async_save` is not used: it copies after it was called, and cannot report a rank that runs
out of memory to the others. Its process would need the copy sent to it, DTensors and meshes
pickled, and a second set of process groups. The thread costs training the interpreter lock, except
in the long calls that release it (copying, digests, file writes).
"""

from __future__ import annotations

import atexit
import concurrent.futures
import copy
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.checkpoint.chunks import stored_alike
from megatron_fsdp_adapter.checkpoint.coordination import Coordinator, message_of
from megatron_fsdp_adapter.checkpoint.dcp import PathLike, begin_save, make_writer
from megatron_fsdp_adapter.checkpoint.state import mapped
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter


@dataclass(frozen=True)
class Writing:
    """A save that a thread is writing.

    asked: set by `finish`, which raises the save's error.
    """

    future: Future[Any]
    writer: SafeWriter
    asked: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        """True if the thread of this rank is done. Local."""
        return self.future.done()

    def finish(self, ranks: Coordinator) -> None:
        """Waits for the save. Collective; raises CheckpointError on every rank if it failed on any.

        ranks: all ranks, on a group that no other running save uses.
        """
        self.asked.set()
        atexit.unregister(self._fail_the_process)
        ranks.run(
            "writing the checkpoint in the background", lambda: _result(self.future, self.writer)
        )

    def watch(self) -> None:
        """Reports a failure that no `finish` call raises: on stderr when it happens, and by the
        exit status of the process."""
        # In the thread, as soon as it has failed.
        self.future.add_done_callback(self._notify)
        atexit.register(self._fail_the_process)

    def _notify(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            return
        self.writer.discard()
        if not self.asked.is_set():
            print(
                f"{self.writer.checkpoint_id} was not saved: the background write failed "
                f"({message_of(error)}). The previous checkpoint is kept",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def _fail_the_process(self) -> None:
        """Makes Python exit with status 120 if the save failed and `finish` was never called.

        Runs at exit, after Python has joined the thread. Python exits with 120 if it cannot flush a
        standard stream, and no exit handler can set the status otherwise."""
        if not self.future.done() or self.future.exception() is None:
            return
        stream, flush = sys.stderr, sys.stderr.flush

        def flush_or_fail() -> None:
            flush()
            if sys.is_finalizing():
                raise OSError(f"{self.writer.checkpoint_id} was not saved")

        stream.flush = flush_or_fail  # type: ignore[method-assign]


class AsyncSaver:
    """Background saves, one checkpoint at a time.

    The constructor, `save`, `start`, `wait` and `close` are collective calls: all ranks, in the
    same order. The context manager calls `close`. A process that ends without `close` still
    finishes the running save, because Python joins the thread. If it destroys its process groups
    first, that save is abandoned and the previous checkpoint stays. A failed save is reported on
    stderr; without a later `wait` or `close` the process exits with status 120.
    """

    def __init__(self) -> None:
        """Raises ValueError if torch.distributed is not initialized."""
        self.ranks = Coordinator.of(dist.new_group(backend="gloo"))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._buffers: dict[str, torch.Tensor] = {}
        self._writing: Writing | None = None

    def save(
        self,
        root: PathLike,
        iteration: int,
        state: Mapping[str, Any],
        keep_last: int | None = None,
        *,
        topology: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts `save_checkpoint` in the background; the state may change once this returns.

        First waits for the previous save. The checkpoint becomes the newest one of `root` once it
        is complete on all ranks; until then the previous one stays. Raises on every rank the errors
        of `save_checkpoint` and of the previous save; nothing is then saved.
        """
        self.wait()
        stored = begin_save(self.ranks, Path(root), iteration, state, keep_last)
        self._writing = self.start(
            stored, lambda: make_writer(Path(root), iteration, keep_last, topology)
        )

    def start(
        self, stored: Mapping[str, Any], make_writer: Callable[[], SafeWriter]
    ) -> Writing:
        """Copies a state, as torch DCP stores it, and starts writing it. For callers that check and
        finish saves themselves: a second call overwrites the copy of the first.

        Raises on every rank if a rank has no memory for the copy; nothing is then written."""
        copied, _ = self.ranks.run(
            "copying the state", lambda: host_copy(stored, self._buffers)
        )
        writer = make_writer()
        future = self._thread.submit(
            torch_dcp.save,
            copied,
            storage_writer=writer,
            planner=torch_dcp.DefaultSavePlanner(),
            process_group=self.ranks.group,
        )
        writing = Writing(future, writer)
        writing.watch()
        return writing

    @property
    def busy(self) -> bool:
        """True while a save is running on this rank. Local."""
        return self._writing is not None and not self._writing.is_over

    def wait(self) -> None:
        """Waits for the running save, if any. Raises CheckpointError on every rank, once, if it
        failed on any."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish(self.ranks)

    def close(self) -> None:
        """Waits, then frees memory and process group, even if the save failed."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._buffers.clear()
            dist.destroy_process_group(self.ranks.group)

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error on this rank alone the other ranks would not join the exchange.
        if kind is None:
            self.close()
        elif self._writing is not None:
            self._writing.future.exception()


def _result(future: Future[Any], writer: SafeWriter) -> None:
    """Waits for a save; deletes the files of a failed one before raising its error.

    `discard` is called here too because a future wakes its waiters before it runs its callbacks."""
    concurrent.futures.wait([future])
    if future.exception() is not None:
        writer.discard()
    future.result()


def host_copy(state: Mapping[str, Any], buffers: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state with a host copy of every tensor and a deep copy of all other values. A DTensor
    becomes a plain tensor that torch DCP stores as it would store the DTensor.

    buffers: memory of the last copy by path, which is used again; what this state does not use is
    freed."""
    before = dict(buffers)
    buffers.clear()

    def on_host(tensor: torch.Tensor, path: str) -> torch.Tensor:
        held = before.pop(path, None)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            pinned = tensor.is_cuda
            held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        buffers[path] = held
        # A new object each time, because `stored_alike` attaches chunks that may differ next time.
        return held.copy_(tensor.detach(), non_blocking=True).detach()

    def copied(value: Any, path: str) -> Any:
        if isinstance(value, DTensor):
            return stored_alike(value, on_host(value._local_tensor, path))
        if isinstance(value, torch.Tensor):
            return on_host(value, path)
        return copy.deepcopy(value)

    found: dict[str, Any] = mapped(state, copied)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return found
