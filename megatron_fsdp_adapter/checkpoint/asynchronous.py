"""Saving while training goes on.

A save copies this rank's part of the state to the host, which is all that training waits for, and
torch DCP's `async_save` plans and writes the copy in a thread. The thread's collectives run on a
group of its own: on the group of training they would meet those of training in an order that
differs between ranks.

Memory: one copy of what this rank holds (tensors in page-locked memory where they come from a
GPU), made at the first save and used again by the next. There is never a second one, since a save
waits for the one before.

A thread and not DCP's process: a process would need the copy to be sent to it, DTensors and their
meshes pickled, and a second set of process groups. What the thread costs training is the
interpreter's lock between the long calls, which release it (copying, digests, file writes).
"""

from __future__ import annotations

import atexit
import concurrent.futures
import copy
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.checkpoint.chunks import stored_alike
from megatron_fsdp_adapter.checkpoint.coordination import Coordinator, message_of
from megatron_fsdp_adapter.checkpoint.dcp import PathLike, begin_save, make_writer
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter


@dataclass(frozen=True)
class Writing:
    """A save that a thread writes.

    asked: set once `finish` is called, which raises what the save failed with.
    """

    future: Future[Any]
    writer: SafeWriter
    asked: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        """Whether this rank has nothing left to do. Local."""
        return self.future.done()

    def finish(self, ranks: Coordinator) -> None:
        """Waits. Collective; raises CheckpointError on every rank if the save failed on any.

        ranks: all of them, on a group that no other save is written with meanwhile.
        """
        self.asked.set()
        atexit.unregister(self._fail_the_process)
        ranks.run(
            "writing the checkpoint in the background", lambda: _result(self.future, self.writer)
        )

    def watch(self) -> None:
        """From now on a failure that nothing waits for is told, once: by the thread, when it
        happens, and by the exit status of the process, if nothing has asked until its end."""
        # In the thread, as soon as it has failed.
        self.future.add_done_callback(self._tell)
        atexit.register(self._fail_the_process)

    def _tell(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            return
        self.writer.discard()
        if not self.asked.is_set():
            print(
                f"{self.writer.checkpoint_id} was not saved: writing it in the background failed "
                f"({message_of(error)}); a checkpoint before it stays",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def _fail_the_process(self) -> None:
        """Python has waited for the thread by now. Its own status for a failure after the last
        line of the program is 120, which it takes where a standard stream cannot be flushed."""
        if not self.future.done() or self.future.exception() is None:
            return
        stream, flush = sys.stderr, sys.stderr.flush

        def flush_or_fail() -> None:
            flush()
            if sys.is_finalizing():
                raise OSError(f"{self.writer.checkpoint_id} was not saved")

        stream.flush = flush_or_fail  # type: ignore[method-assign]


class BackgroundWriter:
    """Copies states to the host and has them written in a thread. Making one, `start` and `close`
    are collective: all ranks, in the same order. Whoever starts a second save has waited for the
    first, whose copy is overwritten."""

    def __init__(self) -> None:
        """Raises ValueError if torch.distributed is not initialized."""
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group "
                "first (a world of one is enough)"
            )
        group = dist.new_group(backend="gloo")
        self.ranks = Coordinator(group, dist.get_rank(group), dist.get_world_size(group))
        self._stager = HostStager()

    def start(
        self, state: Callable[[], Mapping[str, Any]], make_writer: Callable[[], SafeWriter]
    ) -> Writing:
        """Returns when the state, as torch DCP is to store it, is copied. Raises on every rank if a
        rank has no memory for the copy; nothing is then written."""
        staged, _ = self.ranks.run("copying the state", lambda: self._stager.copy(state()))
        writer = make_writer()
        future = torch_dcp.async_save(
            staged,
            storage_writer=writer,
            planner=torch_dcp.DefaultSavePlanner(),
            process_group=self.ranks.group,
            async_stager=self._stager,
        )
        writing = Writing(cast("Future[Any]", future), writer)
        writing.watch()
        return writing

    def close(self) -> None:
        """Gives memory and process group back; nothing may be under way."""
        self._stager.close()
        dist.destroy_process_group(self.ranks.group)


class AsyncSaver:
    """Saves in the background, one checkpoint at a time.

    Making one, `save`, `wait` and `close` are collective calls: all ranks, in the same order. As a
    context manager it closes itself. A process that ends without `close` still finishes the save
    that is under way, since Python waits for the thread, unless it destroys its process groups
    before: that save is then given up, and the checkpoint before it stays. A save that fails when
    nothing waits for it is told on stderr, and without a later `wait` or `close` the exit status
    of the process is 120, Python's own for a failure after the last line.
    """

    def __init__(self) -> None:
        """Raises ValueError if torch.distributed is not initialized."""
        self._background = BackgroundWriter()
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
        """`save_checkpoint` in the background: returns when the state is copied, and may change.

        First waits for the save before this one. The checkpoint becomes the newest one of `root`
        when it is complete on all ranks; whatever happens until then, the one before stays. Raises
        on every rank what `save_checkpoint` raises, and what the save before this one ended with;
        nothing is then saved.
        """
        self.wait()
        ranks, folder = self._background.ranks, Path(root)
        stored = begin_save(ranks, folder, iteration, state, keep_last)
        self._writing = self._background.start(
            lambda: stored,
            lambda: make_writer(folder, iteration, keep_last, topology),
        )

    @property
    def busy(self) -> bool:
        """Whether a save is under way on this rank. Local."""
        return self._writing is not None and not self._writing.is_over

    def wait(self) -> None:
        """Returns when nothing is under way. Raises CheckpointError on every rank, once, if the
        save that was failed on any."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish(self._background.ranks)

    def close(self) -> None:
        """Waits, and gives memory and process group back, also if the save failed."""
        try:
            self.wait()
        finally:
            self._background.close()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error of this rank alone the others would not be there to exchange anything.
        if kind is None:
            self.close()
        elif self._writing is not None:
            self._writing.future.exception()


def _result(future: Future[Any], writer: SafeWriter) -> None:
    """Waits; what a failed save wrote is gone before its error is raised. (The future wakes what
    waits for it before it calls back.)"""
    concurrent.futures.wait([future])
    if future.exception() is not None:
        writer.discard()
    future.result()


class HostStager(AsyncStager):
    """Copies a nested state to the host, into the same memory each time.

    An `AsyncStager` of torch DCP, to which it gives what was copied before: a rank that runs out of
    memory must tell the others before DCP, which cannot, is called.
    """

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Of DCP's protocol: there is nothing to wait for."""
        return False

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with a host copy of every tensor and a deep copy of all else. A DTensor
        becomes a plain tensor that torch DCP stores alike."""
        # What this state has no use for is given back.
        self._before, self._buffers = self._buffers, {}
        copied = {key: self._copied(value, key) for key, value in state.items()}
        self._before = {}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copied

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Nothing is left to do."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Of DCP's protocol."""
        return None

    def close(self) -> None:
        """Gives the memory back."""
        self._buffers.clear()

    def _copied(self, value: Any, path: str) -> Any:
        if isinstance(value, DTensor):
            return stored_alike(value, self._host(value._local_tensor, path))
        if isinstance(value, torch.Tensor):
            return self._host(value, path)
        if isinstance(value, Mapping):
            return {key: self._copied(entry, f"{path}.{key}") for key, entry in value.items()}
        if isinstance(value, list):
            return [self._copied(entry, f"{path}.{i}") for i, entry in enumerate(value)]
        return copy.deepcopy(value)

    def _host(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        held = self._before.pop(path, None)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            pinned = tensor.is_cuda
            held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        self._buffers[path] = held
        # A new object each time: it carries what it is stored as, which may differ next time.
        return held.copy_(tensor.detach(), non_blocking=True).detach()
