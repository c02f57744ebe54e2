"""A small plain PyTorch model, for tests without Megatron. Sizes are uneven on purpose."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

VOCAB, WIDTH, ROWS = 19, 10, 4


def device() -> torch.device:
    """Of this rank: its GPU if ranks talk by NCCL, else the CPU."""
    on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


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


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(5)
    return Net().to(device(), dtype)


def tokens(step: int, microbatch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch + rank)
    return torch.randint(0, VOCAB, (ROWS, 7), generator=generator).to(device())
