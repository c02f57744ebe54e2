"""A rank of a replica that trains under torchft, as a user's program does. It writes a line of JSON
for each attempt at a step."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import (
    elastic_optimizer,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from tests.lib.plain.plain import Block, net, tokens
from tests.lib.ranks.ranks import end_with_parent

RANKS = 2
"""Ranks of a replica."""


@dataclass
class Options:
    """What a replica is started with."""

    # The folder of logs.
    folder: str
    # The address of torchft's lighthouse.
    lighthouse: str = ""
    # The number of this replica.
    replica: int = 0
    # Steps to take.
    steps: int = 100_000
    # `fully_shard_model` or `fully_shard`.
    door: str = "fully_shard_model"
    # Of `fully_shard_model`.
    strategy: str = "optim_grads_params"
    # Whether the quorum runs beside the forward.
    is_async: bool = False
    # Whether state is sent by the process group, and not by HTTP.
    sends_by_group: bool = False
    # Seconds that each step takes longer.
    pause_s: float = 0.05
    # Seconds after which torchft gives up a collective or a request.
    timeout_s: float = 30.0


def sharded(
    door: str, manager: Any, mesh: Any, strategy: str = "optim_grads_params"
) -> tuple[Any, Any]:
    """A model, sharded over `mesh`, and its optimizer before `elastic_optimizer`."""
    module: Any = net(blocks=2)
    if door == "fully_shard":
        for block in module.blocks:
            fully_shard(block, mesh=mesh, elastic=manager)
        fully_shard(module, mesh=mesh, elastic=manager)
        return module, torch.optim.AdamW(module.parameters(), lr=0.01)
    model = fully_shard_model(
        module, mesh, [Block], data_parallel_sharding_strategy=strategy, elastic=manager
    )
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def digest(model: nn.Module) -> str:
    """A hash of this rank's rows of all parameters."""
    total = hashlib.blake2b(digest_size=8)
    for param in model.parameters():
        total.update(param._local_tensor.detach().numpy().tobytes())
    return total.hexdigest()


def data_of(step: int, replica: int, rank: int) -> torch.Tensor:
    """The data of a rank of a replica in a step."""
    return tokens(step, 0, RANKS * replica + rank)


def _manager(options: Options) -> Any:
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    class Noted(ProcessGroupGloo):
        """Knows which replicas are in the quorum."""

        replicas: tuple[int, ...] = ()

        def configure(self, *args: Any, **given: Any) -> None:
            self.replicas = tuple(sorted(one // RANKS for one in args[-1]))
            super().configure(*args, **given)

    timeout = timedelta(seconds=options.timeout_s)
    group = Noted(timeout=timeout)
    transport = None
    if options.sends_by_group:
        transport = PGTransport(group, timeout, torch.device("cpu"))
    return Manager(
        pg=group,
        checkpoint_transport=transport,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=options.is_async,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=120),
        lighthouse_addr=options.lighthouse,
        replica_id=f"replica_{options.replica}",
        hostname="127.0.0.1",
        quorum_retries=20,
    )


def train(options: Options, rank: int) -> None:
    """Trains until the steps are there."""
    manager = _manager(options)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    model, inner = sharded(options.door, manager, mesh, options.strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 3, 0.9)
    optimizer = elastic_optimizer(manager, inner, model, scheduler=scheduler)
    log = Path(options.folder, f"{options.replica}.{rank}.jsonl")
    while manager.current_step() < options.steps:
        optimizer.zero_grad()
        before = manager.current_step()
        loss = model(data_of(before, options.replica, rank))
        loss.backward()
        time.sleep(options.pause_s)
        healed = manager.current_step()  # of a replica that joins beside its forward
        optimizer.step()
        is_committed = manager.current_step() == healed + 1
        if is_committed:
            scheduler.step()
        line = {
            "pid": os.getpid(),
            "time": time.time(),
            "step": healed,
            "committed": is_committed,
            "replicas": manager._pg.replicas,
            "takes_part": manager.is_participating(),
            "participants": manager.num_participants(),
            "loss": loss.item().hex() if healed == before else "",
            "weights": digest(model),
        }
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
    manager.shutdown(wait=False)


def run_rank(options: Options, rank: int, environment: dict[str, str]) -> None:
    """The body of the process of a rank."""
    end_with_parent()
    text = os.open(
        Path(options.folder, f"{options.replica}.{rank}.txt"),
        os.O_CREAT | os.O_APPEND | os.O_WRONLY,
    )
    os.dup2(text, 1)
    os.dup2(text, 2)
    os.environ |= environment | {"RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=60))
    train(options, rank)
    os._exit(0)  # torchft's threads may wait for peers that are gone
