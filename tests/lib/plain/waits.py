"""Ways in which ranks come to wait for each other, or one for another that is late. Each is a
program of one step or some steps, after steps that are alike."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter import fully_shard
from megatron_fsdp_adapter.core.comm import wait_watch
from megatron_fsdp_adapter.core.comm.communicator import CommunicationError
from tests.lib.plain.late_gradients import Block, inputs

LATE_S = 4.0
"""How long a rank is late, which is longer than any threshold of `QUICK`."""
QUICK = {"POLL_S": 0.2, "QUIET_S": 0.8, "REPORT_S": 2.0, "RAISE_S": 1.0}
"""What the watch waits for in tests."""
AHEAD = 2
"""Steps before that in which ranks differ."""


class Vision(nn.Module):
    """A tower that ranks without an image may leave out, and layers behind it. All units, and the
    root, are of one size: gloo ends a process that receives more than it expects."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Block()
        self.lm = nn.ModuleList(Block() for _ in range(3))
        self.head = Block()

    def forward(
        self, x: torch.Tensor, tower: bool = True, order: tuple[int, ...] = (0, 1, 2)
    ) -> torch.Tensor:
        if tower:
            x = self.tower(x)
        for number in order:
            x = self.lm[number](x)
        return self.head(x)


class Run:
    """A model on this rank and its steps. `odd`: this rank differs from the others."""

    def __init__(self, rank: int, device: str = "cpu") -> None:
        torch.manual_seed(5)
        self.model = Vision().to(device)
        for unit in (self.model.tower, *self.model.lm):
            fully_shard(unit)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.rank = rank
        self.odd = rank == 1
        self.device = device

    def forward(self, **how: Any) -> torch.Tensor:
        return self.model(inputs(0, 0, self.rank).to(self.device), **how)

    def step(self, microbatches: int = 1, **how: Any) -> None:
        for number in range(microbatches):
            self.model.set_requires_gradient_sync(number == microbatches - 1)
            self.forward(**how).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, number: int = 3) -> None:
        for _ in range(number):
            self.step()


def _unit_skipped(run: Run) -> None:
    run.step(order=(0, 2) if run.odd else (0, 1, 2))


def _other_order(run: Run) -> None:
    run.step(order=(1, 0, 2) if run.odd else (0, 1, 2))


def _tower_on_one(run: Run) -> None:
    run.step(tower=not run.odd)


def _raises(*unused: Any) -> None:
    raise ValueError("no image")


def _exception_caught(run: Run) -> None:
    if run.odd:
        handle = run.model.lm[1].register_forward_pre_hook(_raises)
        with contextlib.suppress(ValueError):
            run.step()
        handle.remove()
    run.steps()


def _exception(run: Run) -> None:
    if run.odd:
        run.model.lm[1].register_forward_pre_hook(_raises)
    run.steps()


def _ends_early(run: Run) -> None:
    run.steps(0 if run.odd else 3)


def _microbatches(run: Run) -> None:
    run.step(1 if run.odd else 2)
    run.steps()


def _evaluates(run: Run) -> None:
    if not run.odd:
        with torch.no_grad():
            run.forward()
            run.forward()
    run.steps()


def _evaluates_beside_a_barrier(run: Run) -> None:
    if not run.odd:
        with torch.no_grad():
            run.forward()
    dist.barrier()
    run.steps()


WAYS: dict[str, tuple[Callable[[Run], None], str]] = {
    "a unit skipped": (_unit_skipped, "rank 1: no call of `lm.1` in the last forward"),
    "another order": (_other_order, "rank 1: the weights of `lm.0`"),
    "an exception that is caught": (_exception_caught, "rank 1: the weights of `root`"),
    "an exception": (_exception, "rank 1 has ended ("),
    "an early end": (_ends_early, "rank 1 has ended ("),
    "a tower on one rank": (_tower_on_one, "rank 1: no call of `tower` in the last forward"),
    "another number of microbatches": (_microbatches, "rank 1: the gradients of `lm.2`"),
    "an evaluation on one rank": (_evaluates, "rank 0: the weights of `root`"),
    "an evaluation beside a barrier": (
        _evaluates_beside_a_barrier,
        "rank 1 waits in torch.distributed.barrier",
    ),
}
"""What the ranks do, and what the error says."""


def error_of(rank: int, world: int, name: str, device: str = "cpu") -> tuple[str, float]:
    """The error of this rank, and the seconds until it came."""
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(patch.multiple(wait_watch, **QUICK))
        else:
            # NCCL's groups wait for kernels that never end when they are destroyed.
            dist.destroy_process_group = lambda *unused: None
        run = Run(rank, device)
        run.steps(AHEAD)
        began = time.monotonic()
        try:
            WAYS[name][0](run)
            if device != "cpu" and not (run.odd and name == "an early end"):
                torch.cuda.synchronize()  # the host waits for nothing by itself
                run.steps()
        except CommunicationError as error:
            return str(error), time.monotonic() - began
        raise AssertionError(f"rank {rank} went through")


def _late_in_data(run: Run) -> None:
    if run.odd:
        time.sleep(LATE_S)
    run.step()


def _late_in_a_unit(run: Run) -> None:
    if run.odd:
        run.model.lm[1].register_forward_pre_hook(lambda *_: time.sleep(LATE_S))
    run.step()


def _late_in_a_barrier(run: Run) -> None:
    """Rank 1 waits in a barrier of others, and these for one that is late."""
    if run.rank == 0:
        time.sleep(LATE_S)
    dist.barrier()
    run.step()


def _stopped(run: Run) -> None:
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if run.odd:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        timer = threading.Timer(LATE_S, os.kill, (pids[1], signal.SIGCONT))
        timer.start()
    run.step()


LATE: dict[str, tuple[Callable[[Run], None], str]] = {
    "data": (_late_in_data, "rank 1 has launched nothing for"),
    "a unit, as where it compiles": (_late_in_a_unit, "rank 1 has launched nothing for"),
    "a checkpoint of one rank": (_late_in_a_barrier, ""),
    "a stopped process": (_stopped, "rank 1 gives no sign"),
}
"""What a rank is late in, and what is reported on the one that waits in the engine, if any is."""


def reported(
    rank: int, world: int, name: str, device: str = "cpu"
) -> tuple[list[str], dict[str, list[float]]]:
    """Lines that this rank has printed, and its weights after the step."""
    printed = io.StringIO()
    with patch.multiple(wait_watch, **QUICK), patch.object(sys, "stderr", printed):
        run = Run(rank, device)
        run.steps(AHEAD)
        LATE[name][0](run)
        weights = {n: p.full_tensor().tolist() for n, p in run.model.named_parameters()}
    return printed.getvalue().splitlines(), weights
