"""Plain modules whose weights are exported: sharded over meshes, trained, compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.plain.fully_shard import FullyShardedModel
from tests.lib.plain.plain import Block, Net, tokens

Tensors = Mapping[str, torch.Tensor]


def assert_same(found: Tensors, wanted: Tensors, why: str) -> None:
    """The same names, dtypes and bits."""
    torch.testing.assert_close(
        dict(found), dict(wanted), rtol=0, atol=0, msg=lambda text: f"{why}: {text}"
    )


class Tied(Net):
    """With a tied head, a frozen norm, a frozen table of integers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.blocks[1].norm.requires_grad_(False)
        codes = torch.arange(250, 272, dtype=torch.int32).view(11, 2)  # bf16 rounds some
        self.blocks[0].codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("counter", torch.tensor([3, 4]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def sharded(strategy: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(5)
    model = fully_shard_model(
        Tied().to(dtype),
        options.pop("mesh", None),
        [Block],
        data_parallel_sharding_strategy=strategy,
        **options,
    )
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))


def mesh_options(world: int, strategy: str) -> list[dict[str, Any]]:
    """Of wrapping: without an outer axis and, where there can be one, with it."""
    found: list[dict[str, Any]] = [{}]
    for outer in ("no_shard", "optim") if world > 1 else ():
        if outer == "no_shard" or strategy != "no_shard":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
            found.append({"outer_dp_sharding_strategy": outer, "mesh": mesh})
    return found


def train(model: FullyShardedModel, optimizer: Any, step: int) -> None:
    model(tokens(step, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()
