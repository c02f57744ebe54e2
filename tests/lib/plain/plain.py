"""A small plain PyTorch model, for tests without Megatron, and what a training loop is given of it,
sharded or not. Sizes are uneven on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from tests.lib.gpt.gpt import full_all

VOCAB = 19
WIDTH = 10
ROWS = 4


def device() -> torch.device:
    """Of this rank: its GPU if ranks talk by NCCL, else the CPU."""
    on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
    if on_gpu:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 23), nn.Linear(23, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(tokens[:, :-1]))) * self.temperature
        targets = tokens[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)


def net(dtype: torch.dtype = torch.float32, blocks: int = 3) -> Net:
    torch.manual_seed(5)
    return Net(blocks).to(device(), dtype)


def tokens(step: int, microbatch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch + rank)
    return torch.randint(0, VOCAB, (ROWS, 7), generator=generator).to(device())


STEPS = 4
LR = 0.05


@dataclass
class Side:
    """What a training loop is given, sharded or not. `strategy`, None on the unsharded side, tells
    on which one it runs; there a loss is the mean over all ranks' data."""

    rank: int
    world: int
    strategy: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    models: list[nn.Module] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    def model(self, module: nn.Module | None = None, **options: Any) -> Any:
        """A module, sharded on that side."""
        if module is None:
            module = net(self.dtype, blocks=2)
        if self.strategy is not None:
            strategy = {"data_parallel_sharding_strategy": self.strategy}
            kinds = {type(child) for child in module.modules()} & {Block, nn.Embedding}
            options = {"fsdp_unit_modules": list(kinds), **strategy, **self.options, **options}
            module = fully_shard_model(module, **options)
        self.models.append(module)
        return module

    @property
    def ranks(self) -> Sequence[int]:
        """Whose data this side trains on by itself."""
        return range(self.world) if self.strategy is None else [self.rank]

    def inner(self, model: Any) -> Any:
        """The user's own module."""
        return model if self.strategy is None else model.module

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        if self.strategy is None:
            return optimizer
        return fully_shard_optimizer(optimizer)

    def sgd(self, params: Iterable[Any], **options: Any) -> Any:
        return self.optimizer(plain_sgd(params, **options))

    def steps(self, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> Iterator[Any]:
        """(number, model, optimizer) of each step of a new model with SGD, or what `make` makes of
        its parameters."""
        model = self.model()
        optimizer = self.optimizer((make or plain_sgd)(model.parameters()))
        for step in range(STEPS):
            yield step, model, optimizer

    def step(self, model: Any, optimizer: Any, step: int) -> None:
        self.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    def loss(self, model: nn.Module, step: int, microbatch: int = 0, without: int = 0) -> Any:
        """This rank's, or all ranks' but the first `without`, divided by all."""
        if self.strategy is not None:
            return model(tokens(step, microbatch, self.rank))
        losses = [model(tokens(step, microbatch, rank)) for rank in self.ranks[without:]]
        return torch.stack(losses).sum() / self.world

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self.strategy is None else model.no_sync()

    def clip(self, model: Any, norm: float, norm_type: float = 2.0) -> None:
        """By the model where it is sharded."""
        if self.strategy is None:
            self.note(nn.utils.clip_grad_norm_(model.parameters(), norm, norm_type))
        else:
            self.note(model.clip_grad_norm_(norm, norm_type))

    def note(self, value: torch.Tensor) -> None:
        """A number that both sides must have: a mean over ranks."""
        value = value.detach().clone()
        if self.strategy is not None:
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            dist.all_reduce(value)
            value /= self.world
        self.numbers.append(value.item())

    def weights(self) -> dict[str, torch.Tensor]:
        """Of all models, whole, by number and name, a scalar as one row; collective."""
        found = {}
        for number, model in enumerate(self.models):
            state = {n.removeprefix("module."): v for n, v in model.state_dict().items()}
            full = state if self.strategy is None else full_all(state)
            for name, value in full.items():
                found[f"{number} {name}"] = value.reshape(value.shape or (1,)).clone()
        return found


Loop = Callable[[Side], None]
Make = Callable[[Any], torch.optim.Optimizer]


def plain_sgd(params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **{"lr": LR, "momentum": 0.9, "weight_decay": 0.1, **options})


def assert_nothing_is_staged(optimizer: Any) -> None:
    """Of an optimizer in host memory nothing is on the device; of others nothing is asked."""
    shards = getattr(optimizer, "_fsdp_shards", None)
    parts = () if shards is None else shards.residency.parts
    buffers = [buffer for part in parts for buffer in part.buffers]
    for buffer in buffers:
        assert not buffer.allocated
