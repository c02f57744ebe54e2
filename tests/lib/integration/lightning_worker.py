"""Loops of Lightning with tensor parallelism, which `test_lightning.py` runs with torch's
`fully_shard` and with ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed.fsdp as torch_fsdp
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megatron_fsdp_adapter import leave_fsdp2, use_as_fsdp2

TP = 2
STEPS = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Layer(), Layer(), nn.Linear(16, 4))


def parallelized(model: Any, mesh: Any) -> Any:
    for layer in model[1:3]:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tensor_parallel"], plan)
        torch_fsdp.fully_shard(layer, mesh=mesh["data_parallel"])
    torch_fsdp.fully_shard(model, mesh=mesh["data_parallel"])
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(100 * step + rank // TP)
    return torch.randn(4, 8, generator=seeded)


def with_fabric(rank: int, world: int, folder: Path) -> list[float]:
    """Losses of steps, of which the last one is repeated from a checkpoint."""
    strategy = FabricStrategy(parallelized, data_parallel_size=world // TP, tensor_parallel_size=TP)
    fabric = lightning.Fabric(accelerator="cpu", strategy=strategy, devices=world)
    fabric.launch()
    model = fabric.setup(made())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = []

    def step(number: int) -> None:
        loss = model(batch(number, rank)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())

    for number in range(STEPS):
        step(number)
    fabric.save(folder, {"model": model, "optimizer": optimizer})
    step(STEPS)
    fabric.load(folder, {"model": model, "optimizer": optimizer})
    step(STEPS)
    assert found[-1] == found[-2], found
    return found


class Trained(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def configure_model(self) -> None:
        self.net = parallelized(made(), self.device_mesh)

    def training_step(self, given: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(given).square().mean()
        self.found.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def with_trainer(rank: int, world: int, folder: Path) -> list[float]:
    """Losses of a trainer's steps."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=ModelParallelStrategy(world // TP, TP),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = Trained()
    batches: Any = [batch(step, rank) for step in range(STEPS)]
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    return model.found


def compare(rank: int, world: int, folder: Path) -> None:
    """Both sides of each loop, which must have the same bits."""
    sides: tuple[Callable[[], Any], ...] = (leave_fsdp2, use_as_fsdp2)
    for run in (with_fabric, with_trainer):
        found = []
        for use in sides:
            use()
            found.append(run(rank, world, folder / f"{run.__name__} {use.__name__}"))
        leave_fsdp2()
        assert found[0] == found[1], f"{run.__name__}: {found}"
        assert len(found[0]) >= STEPS
