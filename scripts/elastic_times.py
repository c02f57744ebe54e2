"""Times training steps of two replicas of one GPU, under torchft and as HSDP in one job, and the
death and the return of one of them.

    python scripts/elastic_times.py --shape 1.5b --layers 28

The model, its dtypes and its optimizer are those of `fsdp2_times.py`, sharded by `fully_shard`.
torchft has to be installed. Without GPUs (`--shape tiny`) times tell nothing.
"""

from __future__ import annotations

import argparse
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


def say(text: str) -> None:
    print(text, flush=True)


class Rank:
    """One GPU's part in a run: of HSDP in one job, or a replica of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options  # of the command line
        self.is_elastic = options.part != "hsdp"  # whether this is a replica of its own
        self.number = int(os.environ["NUMBER"])  # of the replica
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", self.number) if on_gpu else torch.device("cpu")
        if on_gpu:
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

        on_gpu = self.device.type == "cuda"
        limit = timedelta(seconds=self.options.timeout)
        # A collective with a dead peer ends when this is over: 60 s by default.
        kind = torchft.ProcessGroupNCCL if on_gpu else torchft.ProcessGroupGloo
        group = kind(timeout=limit)
        return torchft.Manager(
            pg=group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            use_async_quorum=self.options.part == "async",
            timeout=limit,
            replica_id=f"replica_{self.number}",
            hostname="127.0.0.1",
        )

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, number: int) -> float:
        """Runs a step; returns its milliseconds."""
        generator = torch.Generator().manual_seed(2 * number + self.number)
        size = (1, SHAPES[self.options.shape].tokens + 1)
        tokens = torch.randint(0, VOCAB, size, generator=generator).to(self.device)
        self.wait()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.net(tokens).backward()
        self.optimizer.step()
        self.wait()
        return 1000 * (time.perf_counter() - begin)

    def train(self) -> None:
        """Trains until it is killed. Prints each step's time, and how many replicas took part."""
        number = 0
        while True:
            took = self.step(number)
            number += 1
            count = 2 if self.manager is None else self.manager.num_participants()
            say(f"step {number} of {count}: {took:.1f} at {time.time():.3f}")


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
        "RUST_LOG": "error",
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    path = f"{options.out}/{part}.{number}.txt"
    with open(path, "a") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


def steps_of(options: argparse.Namespace, part: str, number: int) -> list[tuple[str, float, float]]:
    """The steps of a process: number of replicas, milliseconds, and the time at their end."""
    with open(f"{options.out}/{part}.{number}.txt") as file:
        text = file.read().rpartition("\n")[0]
    lines = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return [(words[3], float(words[4]), float(words[6])) for words in lines]


def of_two(options: argparse.Namespace, part: str, after: float = 0.0) -> list[float]:
    """The milliseconds of counted steps after a time in which both replicas took part."""
    found = []
    for count, took, at in steps_of(options, part, 0):
        if count == "2:" and at > after:
            found.append(took)
    return found[WARM_UP:]


def wait_for(options: argparse.Namespace, is_so: Callable[[], bool]) -> None:
    """Waits until something is so. TimeoutError after the limit."""
    until = time.monotonic() + options.limit
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(f"nothing more came in {options.limit} s: see {options.out}")
        time.sleep(0.01)


def run(options: argparse.Namespace, part: str) -> None:
    """Runs a part and prints its step time. Of replicas it kills one then, and restarts it."""
    port = free_port()
    processes = [started(options, part, number, port) for number in range(2)]
    try:
        wait_for(options, lambda: len(of_two(options, part)) >= options.steps)
        times = of_two(options, part)[: options.steps]
        say(f"{part:6} {statistics.median(times):.1f} ms ({min(times):.1f}-{max(times):.1f})")
        if part != "hsdp":
            _kill_one(options, part, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _kill_one(options: argparse.Namespace, part: str, processes: list[Any]) -> None:
    processes[1].kill()
    killed = time.time()
    processes[1].wait()

    def alone() -> list[float]:
        return [at for count, _, at in steps_of(options, part, 0) if count == "1:" and at > killed]

    wait_for(options, lambda: bool(alone()))
    processes[1] = started(options, part, 1, free_port())
    wait_for(options, lambda: bool(of_two(options, part, killed + 1.0)))
    steps = [one for one in steps_of(options, part, 1) if one[2] > killed]
    say(
        f"{part:6} {alone()[0] - killed:.2f} s from the kill to the next step; the first step of "
        f"the replica that came back {steps[0][1] / 1000:.2f} s, with its healing"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.5b", help="default %(default)s")
    for name, number in (("layers", 28), ("steps", 40), ("timeout", 20), ("limit", 240)):
        parser.add_argument(f"--{name}", type=int, default=number, help="default %(default)s")
    parser.add_argument("--out", default=".", help="folder of what processes print")
    parser.add_argument("--part", choices=PARTS, help="for its own processes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    options = parser.parse_args()
    if options.part is not None:
        Rank(options).train()
        os._exit(0)
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1500
    )
    address = lighthouse.address().rpartition(":")[2]
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{address}"
    say(f"torch {torch.__version__}, {vars(options)}")
    for part in options.parts:
        run(options, part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
