"""Runs a function in several processes and returns their results.

If a run times out, the error contains every rank's stack.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist


class RanksError(AssertionError):
    """A rank raised (with its traceback), or the run timed out (with every rank's stack)."""


PRELOADED = (
    "torch.distributed.tensor",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron_fsdp_adapter.megatron.wrapper.adapter",
)
"""Modules that the server imports before it forks gloo ranks, which saves each rank the import."""

GRACE_S = 5.0
"""Seconds that other ranks may run after one has failed, so that their errors are reported too."""
STACKS_S = 20.0
"""Seconds that ranks may take to write their stacks after a timeout."""


@contextlib.contextmanager
def rendezvous(world_size: int) -> Iterator[dict[str, str]]:
    """The environment for `init_method="env://"`, with a store that this process serves.

    The store's port stays in use. A free port passed to rank 0 could be taken before it listens."""
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        # As torchrun sets it: the store exists already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _context(backend: str) -> Any:
    """The multiprocessing context of ranks.

    Ranks that may use a GPU are spawned: a CUDA context does not survive a fork, and importing
    Transformer Engine creates one. Others are forked from a server that runs nothing, so that they
    inherit no lock or thread."""
    if backend == "nccl" or torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def end_with_parent() -> None:
    """Makes this process, which `multiprocessing` started, end with its parent, together with all
    processes that it starts (its process group)."""
    parent = mp.parent_process()
    assert parent is not None, "this process was not started by multiprocessing"
    os.setpgid(0, 0)

    def watch() -> None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


@contextlib.contextmanager
def running(processes: Sequence[Any]) -> Iterator[None]:
    """Runs the processes, which call `end_with_parent` first, inside the block. After it they and
    all processes that they have started have ended."""
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _child(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    stacks: str,
    timeout: float,
    backend: str,
    args: Any,
    environment: dict[str, str],
    connection: Any,
) -> None:
    end_with_parent()
    # Imported objects are excluded from garbage collection, which makes tests that count live
    # tensors much faster.
    gc.freeze()
    with open(stacks, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        # Runs in a separate thread, because a rank inside a driver call may not handle a signal.
        faulthandler.dump_traceback_later(timeout, file=stack_file)
        os.environ.clear()
        os.environ.update(environment)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        try:
            torch.set_num_threads(1)
            if backend == "nccl":
                # NCCL rejects ranks that share a device by default.
                torch.cuda.set_device(rank % torch.cuda.device_count())
            dist.init_process_group(backend, timeout=timedelta(seconds=120))
            try:
                result = fn(rank, world, *args)
            finally:
                dist.destroy_process_group()
            connection.send(("ok", result))
        except BaseException:
            connection.send(("error", traceback.format_exc()))


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _stacks_of(processes: list[Any], files: list[Path]) -> str:
    """The stacks of all ranks.

    A rank inside a system call (pinning or copying gigabytes) handles the signal at its end. It
    also writes its stacks without a signal after its timeout."""
    alive = [(p, file) for p, file in zip(processes, files, strict=True) if p.is_alive()]
    for process, _ in alive:
        os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_S
    while any(not _text(file) for _, file in alive) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)  # all threads of the last rank
    return "\n".join(f"--- rank {i}\n{_text(file)}" for i, file in enumerate(files))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
) -> list[Any]:
    """`[fn(rank, world_size, *args) for each rank]`, each in a separate process with a default
    process group. `fn` must be importable and its result picklable.

    Raises:
        RanksError: a rank raised (its traceback), or `timeout` seconds passed (all stacks).
    """
    found = settle_ranks(fn, world_size, *args, timeout=timeout, backend=backend)
    errors = []
    for rank, (ok, value) in enumerate(found):
        if not ok:
            errors.append(f"--- rank {rank}\n{value}")
    if errors:
        raise RanksError("\n".join(errors))
    return [value for _, value in found]


def settle_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    grace: float = GRACE_S,
) -> list[tuple[bool, Any]]:
    """The result of each rank: (True, returned value) or (False, traceback). grace: seconds that
    the others may run after one has failed.

    Raises:
        RanksError: `timeout` seconds passed (all stacks).
    """
    context = _context(backend)
    with tempfile.TemporaryDirectory() as folder, rendezvous(world_size) as where:
        files = [Path(folder) / f"rank{rank}" for rank in range(world_size)]
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = []
        for r in range(world_size):
            processes.append(
                context.Process(
                    target=_child,
                    args=(
                        fn,
                        r,
                        world_size,
                        str(files[r]),
                        timeout,
                        backend,
                        args,
                        {**os.environ, **where},
                        pipes[r][1],
                    ),
                )
            )
        with running(processes):
            for _, sender in pipes:
                sender.close()
            return _collect([receiver for receiver, _ in pipes], processes, files, timeout, grace)


def _collect(
    receivers: list[Any], processes: list[Any], files: list[Path], timeout: float, grace: float
) -> list[tuple[bool, Any]]:
    found: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(found) < len(receivers):
        waiting = [receiver for i, receiver in enumerate(receivers) if i not in found]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = _stacks_of(processes, files)
            errors = {rank: value for rank, (ok, value) in found.items() if not ok}
            if errors:
                what = f"failed: {errors}"
            else:
                what = f"no answer within {timeout:.0f} s"
            raise RanksError(f"{what}\n{stacks}")
        for receiver in cast("list[Any]", ready):
            rank = receivers.index(receiver)
            try:
                status, value = receiver.recv()
            except EOFError:
                status = "error"
                value = f"process ended without a result, see exit code {rank}"
            found[rank] = (status == "ok", value)
            if status != "ok":
                deadline = min(deadline, time.monotonic() + grace)
    return [found[rank] for rank in range(len(receivers))]
