"""Times training steps of two replicas of one GPU, under torchft and as HSDP in one job, and the
death and the return of one of them.

    python scripts/elastic_times.py --shape 1.5b --layers 28

The model, its dtypes and its optimizer are those of `fsdp2_times.py`, sharded by `fully_shard`.
torchft has to be installed. Without GPUs (`--shape tiny`) times tell nothing.

The table says, for each part, milliseconds of a step between two synchronizations of the device;
below it those that the host spends in the parts of a step. Of a kill it says the seconds from it to
the next committed step of the other replica. Of the return: the seconds from the start of the
process to the first step of both, those for which the state was received, and its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_times import SHAPES, VOCAB, Model, by_calls
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import elastic_optimizer, fully_shard

PARTS = ("hsdp", "sync", "async")
"""Replicas in one job; under torchft with the quorum in front of a forward, or beside it."""
WARM_UP = 5
"""Steps that are not counted."""
JOIN_S = 10
"""Seconds that the lighthouse waits for a replica that lives."""

Line = dict[str, Any]
"""A line that a process prints: of a step, or of a healing."""


def say(text: str) -> None:
    print(f"{text}\n", end="", flush=True)  # one write: another thread prints to the same file


class Rank:
    """One GPU's part in a run: of HSDP in one job, or a replica of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options  # of the command line
        self.is_elastic = options.part != "hsdp"  # whether this is a replica of its own
        self.number = int(os.environ["NUMBER"])  # of the replica
        self.spent: dict[str, float] = {}  # milliseconds of the host in this step, by what it does
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cpu")
        if on_gpu:
            # Processes may share a GPU (`get_nccl.sh`): then seconds count, and steps do not.
            self.device = torch.device("cuda", self.number % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        self.manager = self._manager() if self.is_elastic else None  # torchft's
        torch.manual_seed(0)
        with self.device:
            net = Model(SHAPES[options.shape], options.layers)
        dims = {"mesh_shape": (2, 1), "mesh_dim_names": ("replica", "shard")}
        if self.is_elastic:
            dims = {"mesh_shape": (1,), "mesh_dim_names": ("shard",)}
        mesh = init_device_mesh(self.device.type, **dims)  # type: ignore[arg-type]
        given = {"elastic": self.manager} if self.is_elastic else {}
        self.net: Any = by_calls(fully_shard, net, mesh, **given)  # sharded
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=on_gpu)
        self.optimizer: Any = optimizer  # steps on it
        if self.manager is not None:
            self.optimizer = elastic_optimizer(self.manager, optimizer, self.net)

    def _manager(self) -> Any:
        import torchft

        options = self.options
        on_gpu = self.device.type == "cuda"
        kind = torchft.ProcessGroupNCCL if on_gpu else torchft.ProcessGroupGloo
        # A collective with a dead peer ends when this is over: 60 s by default.
        group = kind(timeout=timedelta(seconds=options.timeout))
        # The replica that sends its state ends if that takes longer.
        patience = timedelta(seconds=options.limit)
        manager: Any = torchft.Manager(
            pg=group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            use_async_quorum=options.part == "async",
            timeout=patience,
            quorum_timeout=patience,
            replica_id=f"replica_{self.number}",
            hostname="127.0.0.1",
            checkpoint_transport=timed_transport(patience),
            init_sync=False,  # replicas begin with the same seed
        )
        allreduce = self._timed("allreduce", manager.allreduce)
        manager.allreduce = lambda tensor: Reduction(allreduce(tensor), self._timed)
        for name in ("start_quorum", "should_commit"):
            setattr(manager, name, self._timed(name, getattr(manager, name)))
        return manager

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; its time is added to `spent`."""

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                took = 1000 * (time.perf_counter() - begin)
                self.spent[name] = self.spent.get(name, 0.0) + took

        return timed

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, number: int) -> float:
        """Runs a step; returns its milliseconds."""
        generator = torch.Generator().manual_seed(2 * number + self.number)
        size = (1, SHAPES[self.options.shape].tokens + 1)
        tokens = torch.randint(0, VOCAB, size, generator=generator).to(self.device)
        self.spent.clear()
        self.wait()
        begin = time.perf_counter()
        self._timed("zero_grad", self.optimizer.zero_grad)()
        loss = self._timed("forward", self.net)(tokens)
        self._timed("backward", loss.backward)()
        self._timed("step", self.optimizer.step)()
        self._timed("rest", self.wait)()
        return 1000 * (time.perf_counter() - begin)

    def meet(self) -> None:
        """Waits until both processes of a part have come so far. One that came first would begin
        without the other, which would take over its state then. A replica that returns goes on at
        once."""
        store = dist.TCPStore("127.0.0.1", int(os.environ["MEETING"]), wait_for_workers=False)
        part = self.options.part
        if store.add(part, 1) >= 2:
            store.set(f"{part} have met", "")
        store.wait([f"{part} have met"], timedelta(seconds=self.options.limit))

    def train(self) -> None:
        """Trains until it is killed. Prints a line for each step."""
        self.meet()
        number = 0
        while True:
            before = 0 if self.manager is None else self.manager.current_step()
            took = self.step(number)
            number += 1
            line = {"ms": took, "at": time.time(), "replicas": 2, "committed": True, **self.spent}
            if self.manager is not None:
                line["replicas"] = self.manager.num_participants()
                line["committed"] = self.manager.current_step() > before
            say(json.dumps(line))


class Reduction:
    """A reduction of torchft's, of which the waits are timed."""

    def __init__(self, work: Any, timed: Callable[..., Any]) -> None:
        self._work = work  # torchft's
        self._timed = timed  # the method of a rank

    def wait(self) -> Any:
        return self._timed("wait", self._work.wait)()


def timed_transport(patience: timedelta) -> Any:
    """torchft's transport of states by HTTP, which prints seconds and bytes."""
    from torchft.checkpointing.http_transport import HTTPTransport

    class Timed(HTTPTransport):  # type: ignore[misc,type-arg]
        def send_checkpoint(self, *given: Any, **named: Any) -> None:
            begin = time.perf_counter()
            super().send_checkpoint(*given, **named)
            say(json.dumps({"staged_s": time.perf_counter() - begin}))

        def recv_checkpoint(self, *given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            state: Any = super().recv_checkpoint(*given, **named)
            took = time.perf_counter() - begin
            leaves = torch.utils._pytree.tree_leaves(state)
            size = sum(one.nbytes for one in leaves if isinstance(one, torch.Tensor))
            say(json.dumps({"received_s": took, "bytes": size}))
            return state

    return Timed(timeout=patience, num_chunks=0)


def free_port() -> int:
    """A port that no program listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def started(options: argparse.Namespace, part: str, number: int, port: int) -> Any:
    """A process that runs a part of the measurement; it prints into a file."""
    world = "2" if part == "hsdp" else "1"
    rank = str(number) if part == "hsdp" else "0"
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port if part == "hsdp" else free_port()),
        "WORLD_SIZE": world,
        "RANK": rank,
        "NUMBER": str(number),
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    path = f"{options.out}/{part}.{number}.txt"
    with open(path, "a") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


def lines_of(options: argparse.Namespace, part: str, number: int, key: str) -> list[Line]:
    """The lines of a process that say `key`."""
    with open(f"{options.out}/{part}.{number}.txt", errors="replace") as file:
        text = file.read().rpartition("\n")[0]
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"')]
    return [line for line in found if key in line]


def steps_of(
    options: argparse.Namespace, part: str, number: int, replicas: int, after: float = 0.0
) -> list[Line]:
    """The committed steps of a process after a time in which so many replicas took part."""
    found = []
    for line in lines_of(options, part, number, "ms"):
        if line["committed"] and line["replicas"] == replicas and line["at"] > after:
            found.append(line)
    return found


def wait_for(options: argparse.Namespace, processes: list[Any], is_so: Callable[[], bool]) -> None:
    """Waits until something is so. TimeoutError after the limit, or if a process ends."""
    until = time.monotonic() + options.limit
    while not is_so():
        ended = [one.poll() for one in processes if one.poll() is not None]
        if ended or time.monotonic() > until:
            raise TimeoutError(f"ended: {ended}, or {options.limit} s are over: see {options.out}")
        time.sleep(0.01)


def run(options: argparse.Namespace, part: str) -> list[str]:
    """Runs a part. Returns its lines of the table: of the step, and of a kill if it has one."""
    port = free_port()
    processes = [started(options, part, number, port) for number in range(2)]
    table = []
    try:
        enough = WARM_UP + options.steps
        wait_for(options, processes, lambda: len(steps_of(options, part, 0, 2)) >= enough)
        table.append(row_of_steps(part, steps_of(options, part, 0, 2)[WARM_UP:enough]))
        if part in options.kill_in:
            table.append(kill_one(options, part, processes))
    except TimeoutError as error:
        table.append(f"{part:6} {error}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return table


def row_of_steps(part: str, steps: list[Line]) -> str:
    """The row of the step times, and the host's time in parts of the step; medians."""
    times = [step["ms"] for step in steps]
    host = []
    for name in steps[0]:
        if name not in ("ms", "at", "replicas", "committed"):
            middle = statistics.median(step[name] for step in steps)
            host.append(f"{name} {middle:.1f}")
    middle = statistics.median(times)
    return f"{part:6} {middle:.1f} ms ({min(times):.1f}-{max(times):.1f}); host: {', '.join(host)}"


def kill_one(options: argparse.Namespace, part: str, processes: list[Any]) -> str:
    """Kills a replica, waits until the other one goes on, and starts it again. Returns its row."""
    processes[1].kill()
    killed = time.time()
    processes[1].wait()
    wait_for(options, processes[:1], lambda: bool(steps_of(options, part, 0, 1, killed)))
    alone = steps_of(options, part, 0, 1, killed)[0]["at"] - killed
    begin = time.time()
    processes[1] = started(options, part, 1, free_port())
    wait_for(options, processes, lambda: bool(steps_of(options, part, 1, 2, begin)))
    back = steps_of(options, part, 1, 2, begin)[0]["at"] - begin
    row = f"{part:6} {alone:.2f} s from the kill to the next step; {back:.2f} s from the start to"
    row += " the first step of both"
    received = lines_of(options, part, 1, "received_s")
    if received:
        took, size = received[-1]["received_s"], received[-1]["bytes"]
        staged = lines_of(options, part, 0, "staged_s")[-1]["staged_s"]
        row += f", with {size / 1e9:.3f} GB staged in {staged:.2f} s and received in {took:.2f} s"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.5b", help="default %(default)s")
    for name, number, text in (
        ("layers", 28, ""),
        ("steps", 40, "that are counted; "),
        ("timeout", 20, "seconds until a dead peer is noticed; "),
        ("limit", 240, "seconds that anything may take; "),
    ):
        parser.add_argument(f"--{name}", type=int, default=number, help=f"{text}default {number}")
    parser.add_argument("--out", default=".", help="folder of what processes print")
    parser.add_argument("--part", choices=PARTS, help="for its own processes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--kill-in", nargs="*", choices=PARTS[1:], default=PARTS[1:], help="default: sync async"
    )
    options = parser.parse_args()
    if options.part is not None:
        Rank(options).train()
        os._exit(0)
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=1000 * JOIN_S, heartbeat_timeout_ms=1500
    )
    address = lighthouse.address().rpartition(":")[2]
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{address}"
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["MEETING"] = str(meeting.port)
    say(f"torch {torch.__version__}, {vars(options)}")
    table = []
    for part in options.parts:
        table += run(options, part)
        say(f"{part} is done")
    say("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
