"""Asynchronous saves of Megatron-LM (`--async-save`) and of Megatron-Bridge (`async_save`, from 0.6
on), with our writer in the place of theirs.

From 0.17 on Megatron-LM saves `fsdp_dtensor` checkpoints asynchronously. An async strategy (`nvrx`,
`mcore`) is a table of names: a writer, a function that plans a save, a queue of saves, a request.
Both strategies write into the final folder from another process: a job that is killed meanwhile
leaves half a checkpoint under its final name, and no digests. So modules that ask for a strategy
get the table of this file, whichever they ask for. Megatron-Bridge takes some entries by name, and
these names are replaced (`compat/table.py`). A thread writes, for the reasons in
`checkpoint/asynchronous.py`.

The order of a save is Megatron's:

1. The save is planned, its state is copied, and a request is queued.
2. In every iteration the queue is asked if all ranks have written.
3. If so, the functions of the request are called in order. The first one raises if a rank failed. A
   later one writes the tracker, which so never names a folder that is not complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint import folders, running
from megatron_fsdp_adapter.checkpoint.asynchronous import AsyncSaver, Writing
from megatron_fsdp_adapter.checkpoint.coordination import Coordinator
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter
from megatron_fsdp_adapter.megatron.compat.patches import Original

STRATEGY = "mcore"
"""The strategy whose table is taken, with our entries: the other one's needs a package."""


class Target:
    """Stands for `FileSystemWriterAsync`: the folder that a save goes to. The arguments other than
    `path` choose how a process of Megatron's would write, and are ignored."""

    def __init__(
        self,
        path: str,
        thread_count: int | None = None,
        use_msc: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
    ) -> None:
        """Raises ValueError for an address (msc://...), for which there is no rename."""
        if "://" in str(path):
            raise ValueError(
                f"{path}: a checkpoint at an address cannot be saved asynchronously. Leave "
                "async_save out, or save to a folder"
            )
        self.folder = Path(path)
        self.save: Writing | None = None  # set by `AsyncStrategy.plan`

    def get_save_function_and_args(self) -> tuple[Writing | None, None, tuple[()]]:
        """The parts of a request: the save, which `SaveQueue` knows, and empty ones."""
        return self.save, None, ()


class SaveQueue:
    """Stands for `AsyncCallsQueue`: saves in the order in which they were asked for."""

    def __init__(self, persistent: bool = False, cpu_shm_mode: bool = False) -> None:
        self._requests: deque[tuple[int, Any]] = deque()  # in order, each with its number
        self._next = 0  # the number of the next request

    @staticmethod
    def warmup_persistent_caller(
        rank: int,
        mp_mode: str = "spawn",
        cpu_priority: int | None = None,
        io_priority: int | None = None,
        cpu_shm_mode: bool = False,
    ) -> None:
        """Does nothing: there is no other process to start."""

    def schedule_async_request(self, request: Any) -> int:
        """Queues a request; returns its number. A request's function that is not a save of ours is
        called at once."""
        frozen = request.freeze()
        if not isinstance(frozen.async_fn, Writing) and frozen.async_fn is not None:
            frozen.async_fn(*frozen.async_fn_args, **frozen.async_fn_kwargs)
        self._requests.append((self._next, frozen))
        self._next += 1
        return self._requests[-1][0]

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalizes the requests that all ranks have written, from the oldest on, up to one that is
        not written; returns their numbers.

        To finalize is to call the request's functions, whose errors are raised. blocking: waits for
        all requests. Collective, also with `no_dist`."""
        finalized = []
        while self._requests:
            number, request = self._requests[0]
            if isinstance(request.async_fn, Writing) and not request.async_fn.is_over(blocking):
                break
            self._requests.popleft()
            for function in request.finalize_fns:
                function()
            finalized.append(number)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Number of queued requests; the same on all ranks."""
        return len(self._requests)

    def close(self, abort: bool = False) -> None:
        """Finalizes what is queued, unless `abort`."""
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)


class AsyncStrategy:
    """Stands for `get_async_strategy`, as one module of Megatron-LM sees it.

    original: Megatron's; topology: the contents of a save's record (`record.topology_of`).
    """

    def __init__(self, original: Original, topology: Callable[[], Mapping[str, Any]]) -> None:
        self._original = original
        self._topology = topology
        # The thread that writes and its group of ranks, made by the first save.
        self._background: tuple[AsyncSaver, Coordinator] | None = None
        self._last: Writing | None = None  # the latest save

    def __call__(self, async_strategy: str = STRATEGY, module: str | None = None) -> Any:
        """The name of the strategy that was asked for, and our table, or its entry `module`."""
        _, table = self._original(STRATEGY)
        ours = {
            **table,
            "AsyncCallsQueue": SaveQueue,
            "FileSystemWriterAsync": Target,
            "get_write_results_queue": _no_results,
            "save_state_dict_async_plan": self.plan,
            "save_state_dict_async_finalize": Writing.finish,
        }
        return async_strategy, ours if module is None else ours[module]

    def plan(
        self,
        state_dict: Mapping[str, Any],
        storage_writer: Target,
        process_group: object = None,
        coordinator_rank: int = 0,
        planner: object = None,
        enable_cache: bool = False,
    ) -> tuple[Writing]:
        """Copies the state to the host and begins to write it; returns the arguments of
        `save_state_dict_async_finalize`. Collective.

        First it waits for the previous save, because there is memory for one copy only. The
        arguments behind `storage_writer` are ignored: the layout tells which rank writes what."""
        folder = storage_writer.folder
        running.begin(folder.parent, folders.iteration_of(folder))
        if self._last is not None:
            self._last.is_over(blocking=True)
        if self._background is None:
            # The group is for asking about a save, perhaps while the thread works on the next.
            self._background = AsyncSaver(), Coordinator.of(dist.new_group(backend="gloo"))
        saver, ranks = self._background

        def writer() -> SafeWriter:
            return SafeWriter(folder, dict(self._topology()))

        self._last = saver.start(state_dict, folder.parent, writer, ranks)
        storage_writer.save = self._last
        return (self._last,)


def _no_results(mp_mode: str = "spawn") -> None:
    """None in place of the queue through which a process of Megatron's reports what it wrote."""
