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

import concurrent.futures
import copy
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.checkpoint import folders, running
from megatron_fsdp_adapter.checkpoint.coordination import Coordinator, message_of
from megatron_fsdp_adapter.checkpoint.dcp import PathLike, begin_save, make_writer, write
from megatron_fsdp_adapter.checkpoint.state import StateDict, StateMapping, mapped
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter
from megatron_fsdp_adapter.core.dtensor.chunks import stored_alike


@dataclass(frozen=True)
class Writing:
    """A save that a thread is writing.

    future: the write; its thread deletes the files of a failed save. ranks: all ranks, for the
    exchanges of `is_over` and `finish`. finish_called: set by `finish`, which raises the save's
    error; the thread then does not print it.
    """

    future: Future[None]
    ranks: Coordinator
    finish_called: threading.Event

    def is_over(self, blocking: bool) -> bool:
        """True if all ranks have written; every rank gets the same answer. Collective.

        blocking: waits for this rank's write and returns True, without an exchange."""
        if blocking:
            concurrent.futures.wait([self.future])
            return True
        everywhere = torch.tensor(int(self.future.done()), device="cpu")
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=self.ranks.group)
        return bool(everywhere)

    def finish(self) -> None:
        """Waits for the save. Collective; raises CheckpointError on every rank if it failed on
        any."""
        self.finish_called.set()
        self.ranks.run("writing the checkpoint in the background", self.future.result)


def _write(
    stored: StateDict, writer: SafeWriter, ranks: Coordinator, finish_called: threading.Event
) -> None:
    """Writes a state; prints the error of a failed save, unless `finish_called` is set.

    Runs in the thread, with no reference to the save's `Writing`. The future of a failed save holds
    the error, and the error holds this frame: such a cycle would keep the process group alive
    after `close`."""
    try:
        write(stored, writer, ranks)
    except BaseException as error:
        if not finish_called.is_set():
            print(
                f"{writer.checkpoint_id}: the save in the background failed "
                f"({message_of(error)}). A load takes the checkpoint that {folders.TRACKER} names",
                file=sys.stderr,
                flush=True,
            )
        raise


class AsyncSaver:
    """Saves checkpoints in the background, one at a time, while training goes on.

    Collective: all ranks make an object, and call `save`, `wait` and `close` in the same order. As
    a context manager it calls `close` at the end. A process that ends without `close` still
    finishes its save, unless it destroys its process groups first: then the previous checkpoint
    stays the newest. A save that fails prints its error; the next `wait` or `close` raises it.

    Examples:
        >>> model = fully_shard_model(nn.Linear(8, 4))
        >>> with AsyncSaver() as saver:
        ...     saver.save(folder, 10, {"model": model.state_dict()})
        ...     loss = model(torch.randn(2, 8)).sum()  # training goes on
        >>> latest_iteration(folder)
        10

    Raises:
        ValueError: torch.distributed is not initialized.
    """

    def __init__(self) -> None:
        """Raises ValueError if torch.distributed is not initialized."""
        # Not the training group. The thread and this class's methods use it in turn: a method waits
        # for the running save first. Callers of `start` do that themselves.
        self.ranks = Coordinator.of(dist.new_group(backend="gloo"))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # Host memory of the last copy, by path in the state.
        self._buffers: dict[str, torch.Tensor] = {}
        # The save that `save` started last; None before the first, and after `wait`.
        self._writing: Writing | None = None

    def save(
        self,
        root: PathLike,
        iteration: int,
        state: StateMapping,
        keep_last: int | None = None,
        *,
        topology: Mapping[str, Any] | None = None,
    ) -> None:
        """Copies a state to host memory, and starts to write it. Arguments are those of
        `save_checkpoint`. The state may change when this returns. First it waits for other saves of
        this process into `root`. The checkpoint becomes the newest one when all ranks are done.

        Raises:
            ValueError: on every rank, as `save_checkpoint`. Nothing is saved.
            CheckpointError: on every rank: the previous save failed. Nothing is saved.
        """
        root = Path(root)
        running.begin(root, iteration)
        self.wait()
        stored = begin_save(self.ranks, root, iteration, state, keep_last)

        def new_writer() -> SafeWriter:
            return make_writer(root, iteration, keep_last, topology)

        # `wait` finishes this save before the next one starts, so the thread's group is free then.
        self._writing = self.start(stored, root, new_writer, self.ranks)

    def start(
        self,
        stored: StateMapping,
        root: Path,
        new_writer: Callable[[], SafeWriter],
        finish_ranks: Coordinator,
    ) -> Writing:
        """Copies a state, as torch DCP stores it, and starts writing it into a folder of `root`.

        For callers that check and finish saves themselves. A second call overwrites the copy of the
        first, so its write must be over. Waits for those of other savers into `root`.

        new_writer: called when all ranks have copied; a save without memory makes no writer.
        finish_ranks: `Writing.ranks` of the result. They need a group of their own, other than that
        of `self.ranks`, if `is_over` or `finish` may be called while the thread writes: the thread
        uses that of `self.ranks`.

        Raises on every rank if a rank has no memory for the copy; nothing is then written."""
        running.wait(root)
        copied, _ = self.ranks.run("copying the state", lambda: host_copy(stored, self._buffers))
        finish_called = threading.Event()
        future = self._thread.submit(_write, copied, new_writer(), self.ranks, finish_called)
        running.add(future, root)
        return Writing(future, finish_ranks, finish_called)

    @property
    def busy(self) -> bool:
        """True while a save is running on this rank. Local."""
        return self._writing is not None and not self._writing.future.done()

    def wait(self) -> None:
        """Waits for the running save, if there is one.

        Raises:
            CheckpointError: on every rank, once: the save failed on a rank.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

    def close(self) -> None:
        """Waits for the running save as `wait` does, and frees memory and process group."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._buffers.clear()
            dist.destroy_process_group(self.ranks.group)

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error on this rank alone the other ranks would not join the exchange of `close`:
        # only this rank's write is waited for, and its own error is not raised over the first.
        if kind is None:
            self.close()
        elif self._writing is not None:
            self._writing.future.exception()


def host_copy(state: StateMapping, buffers: dict[str, torch.Tensor]) -> StateDict:
    """The state with a host copy of every tensor and a deep copy of all other values. A DTensor
    becomes a plain tensor that torch DCP stores as it would store the DTensor.

    buffers: memory of the last copy, by path in the state. It is used again where shape and dtype
    are the same; the rest of it is freed."""
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

    found: StateDict = mapped(state, copied)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return found
