"""A rank of a replica of Megatron-LM on a CPU: `on_cpu.py`, with a line of JSON for each attempt at
a step. With a plan, no torchft: the replicas of each step are as planned.

The environment says what it is, under `ELASTIC_RANK`, as JSON of `Told`.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import on_cpu
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions

import megatron_fsdp_adapter

VARIABLE = "ELASTIC_RANK"
TIMEOUT = timedelta(seconds=60)


@dataclass
class Told:
    """The facts of a rank."""

    # Where it writes lines.
    log: str
    # The number of its replica, its own in it, and the ranks of a replica.
    replica: int
    rank: int
    ranks: int
    # Seconds that each step takes longer, and after which a reduction is given up at the earliest.
    pause_s: float
    timeout_s: float
    # Bytes that a file of checkpoints may have; 0 for any number.
    file_limit: int
    # A folder of code that this package has beside its own; "" for none.
    further_code: str
    # For each step the numbers of replicas, in the order of their ranks; empty: torchft decides.
    plan: list[list[int]]
    # With a plan: the store in which replicas meet, and how many there are.
    store: int = 0
    replicas: int = 0


def told() -> Told:
    return Told(**json.loads(os.environ[VARIABLE]))


def digest(params: Any) -> str:
    """A hash of this rank's rows of parameters."""
    total = hashlib.blake2b(digest_size=8)
    for param in params:
        local = getattr(param, "_local_tensor", param)
        total.update(local.detach().numpy().tobytes())
    return total.hexdigest()


def write_lines(facts: Told) -> None:
    """Makes each attempt at a step write a line."""
    from megatron_fsdp_adapter.megatron.elastic.run import ElasticRun

    take_step = ElasticRun.take_step

    def noting(self: Any, attempt: Callable[[], Any]) -> Any:
        def noted() -> Any:
            time.sleep(facts.pause_s)
            consumed = self._args.consumed_train_samples
            result = attempt()
            replicas = self.manager.replicas
            loss = result[0].get("lm loss")  # of the last pipeline stage
            line = {
                "pid": os.getpid(),
                "time": time.time(),
                "step": self._args.curr_iteration,
                "committed": bool(self._committed),
                "replicas": sorted(replicas),
                "order": replicas,
                "consumed": consumed,
                "learning rate": self._state._optimizer.param_groups[0]["lr"],
                "loss": "" if loss is None else loss.item().hex(),
                "weights": digest(self._state._params),
            }
            with Path(facts.log).open("a") as file:
                file.write(json.dumps(line) + "\n")
            return result

        return take_step(self, noted)

    ElasticRun.take_step = noting  # type: ignore[method-assign]


def note_replicas(facts: Told) -> None:
    """Makes torchft's manager know the numbers of the replicas in a quorum."""
    import torchft

    from megatron_fsdp_adapter.megatron.elastic import limit

    limit.SHORTEST = facts.timeout_s

    class Manager(torchft.Manager):
        def __init__(self, pg: Any, **given: Any) -> None:
            configure = pg.configure

            def noting(*args: Any, **options: Any) -> None:
                self.replicas = [one // facts.ranks for one in args[-1]]
                configure(*args, **options)

            pg.configure = noting
            more = {"replica_id": f"replica_{facts.replica}", "hostname": "127.0.0.1"}
            super().__init__(pg, **{**given, **more})

    torchft.Manager = Manager


def limit_files(size: int) -> None:
    """Makes saves fail, as on a full disk. Logs may have any size."""
    from megatron_fsdp_adapter.megatron.elastic import loop

    save = loop.save_checkpoint_and_time

    def limited(*given: Any, **named: Any) -> Any:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        return save(*given, **named)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    loop.save_checkpoint_and_time = limited


class PlannedManager:
    """A stand-in for torchft's manager. Replicas that a step is planned without run it all the
    same, and take over its gradients."""

    def __init__(self, facts: Told) -> None:
        self._told = facts
        self._store = dist.TCPStore("127.0.0.1", facts.store, timeout=TIMEOUT)
        self._all = self._group("all", list(range(facts.replicas)))
        self._groups: dict[str, Any] = {}  # by the replicas in it
        self._step = 0
        self._pg = self
        self.quorums = 0
        self.replicas: list[int] = []

    def _group(self, name: str, members: list[int]) -> Any:
        facts = self._told
        store = dist.PrefixStore(f"{facts.rank}/{name}", self._store)
        place = members.index(facts.replica)
        return dist.ProcessGroupGloo(store, place, len(members), TIMEOUT)

    def register_state_dict_fn(self, *given: Any) -> None:
        pass

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._step = state_dict["step"]

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def start_quorum(self) -> None:
        planned = self._told.plan[self._step]
        self.quorums += planned != self.replicas
        self.replicas = planned

    def wait_quorum(self) -> None:
        pass

    def errored(self) -> None:
        return None

    def num_participants(self) -> int:
        return len(self.replicas)

    def participating_rank(self) -> int:
        mine = self._told.replica
        return self.replicas.index(mine) if mine in self.replicas else 0

    def allreduce(self, tensor: torch.Tensor) -> Any:
        key = str(self.replicas)
        if self._told.replica in self.replicas:
            if key not in self._groups:
                self._groups[key] = self._group(key, self.replicas)
            self._groups[key].allreduce([tensor], AllreduceOptions()).wait()
            tensor /= len(self.replicas)
        options = BroadcastOptions()
        options.rootRank = self.replicas[0]
        return self._all.broadcast([tensor], options)

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def current_step(self) -> int:
        return self._step

    def shutdown(self, wait: bool = True) -> None:
        pass


def run(argv: list[str]) -> int:
    """The runner, of one rank."""
    facts = told()
    write_lines(facts)
    if facts.further_code:
        megatron_fsdp_adapter.__path__.append(facts.further_code)
    if facts.file_limit:
        limit_files(facts.file_limit)
    if facts.plan:
        from megatron_fsdp_adapter.megatron.elastic import manager

        manager._managers.append(PlannedManager(facts))
    else:
        note_replicas(facts)
    return on_cpu.run(argv)


def main(argv: list[str]) -> int:
    waits = argv[0] == on_cpu.warm_start.SERVE
    on_cpu.prepare_megatron_lm(Path(argv[1 if waits else 0]).resolve().parent)
    if waits:
        import torchft  # noqa: F401

        from megatron_fsdp_adapter.launch import runner  # noqa: F401

        return on_cpu.warm_start.serve(run)
    return run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
