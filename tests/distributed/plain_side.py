"""What a training loop of plain PyTorch is given, sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from tests.distributed.gpt import full_all
from tests.distributed.plain import Block, Net, device, tokens

STEPS = 4
LR = 0.05


class Side:
    """What a loop is given. `strategy`, None on the unsharded side, tells on which one it runs."""

    def __init__(
        self, rank: int, world: int, strategy: str | None, options: Mapping[str, Any] | None = None
    ) -> None:
        self.rank, self.world, self.strategy, self.options = rank, world, strategy, options or {}
        self.models: list[nn.Module] = []
        self.numbers: list[float] = []

    def model(self, module: nn.Module | None = None, **options: Any) -> Any:
        """A module, sharded on that side."""
        if module is None:
            module = net()
        if self.strategy is not None:
            strategy = {"data_parallel_sharding_strategy": self.strategy}
            options = {**strategy, **self.options, **options}
            kinds = {type(child) for child in module.modules()} & {Block, nn.Embedding}
            module = fully_shard_model(module, fsdp_unit_modules=list(kinds), **options)
        self.models.append(module)
        return module

    def inner(self, model: Any) -> Any:
        """The user's own module."""
        return model if self.strategy is None else model.module

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer if self.strategy is None else fully_shard_optimizer(optimizer)

    def sgd(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        return self.optimizer(plain_sgd(params, **options))

    def mean(self, of_rank: Callable[[int], torch.Tensor], without: int = 0) -> torch.Tensor:
        """A loss: this rank's, or all ranks' but the first `without`, divided by all."""
        if self.strategy is not None:
            return of_rank(self.rank)
        losses = [of_rank(rank) for rank in range(without, self.world)]
        return torch.stack(losses).sum() / self.world

    def loss(self, model: nn.Module, step: int, microbatch: int = 0, without: int = 0) -> Any:
        return self.mean(lambda rank: model(tokens(step, microbatch, rank)), without)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self.strategy is None else model.no_sync()

    def note(self, value: torch.Tensor) -> None:
        """A number that both sides must have: a mean over ranks."""
        value = value.detach().clone()
        if self.strategy is not None:
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            dist.all_reduce(value)
            value /= self.world
        self.numbers.append(value.item())

    def weights(self) -> dict[str, torch.Tensor]:
        """Of all models, whole, by number and name; collective."""
        found = {}
        for number, model in enumerate(self.models):
            state = {n.removeprefix("module."): v for n, v in model.state_dict().items()}
            full = state if self.strategy is None else full_all(state)
            found.update({f"{number} {name}": value.clone() for name, value in full.items()})
        return found


Loop = Callable[[Side], None]


def net() -> Net:
    torch.manual_seed(5)
    return Net(2).to(device())


def plain_sgd(params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **{"lr": LR, "momentum": 0.9, "weight_decay": 0.1, **options})
