"""Models of hunted programs: a net of named blocks, of which each does something that wrappers get
wrong. Sizes are uneven, so that ranks hold unequal parts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

INPUTS = 5
WIDTH = 6
HIDDEN = 11
OUTPUTS = 3


class Stop(Exception):
    """The exception that programs raise on purpose, and catch."""


class Mlp(nn.Module):
    """A usual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Twice(nn.Module):
    """Calls one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Several(nn.Module):
    """A list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Named:
    """An output with fields."""

    x: torch.Tensor
    aux: torch.Tensor


class Outputs(nn.Module):
    """Returns a "dict", "tuple" or "dataclass" with an auxiliary loss."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.inner = Mlp()
        self.side = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        aux = self.side(x).square().mean()
        if self.form == "dict":
            return {"x": y, "aux": aux}
        return (y, aux) if self.form == "tuple" else Named(y, aux)


class InPlace(nn.Module):
    """Changes views of outputs in place, and returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate(x)
        value, gate = both.unflatten(-1, (2, WIDTH)).unbind(-2)
        y = value * gate.sigmoid()
        y += x
        return y.view(-1, WIDTH).view(x.shape)


class Attend(nn.Module):
    """Reads weights of a module that is not called (`out_proj`)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.unsqueeze(0)
        return x + self.attention(rows, rows, rows, need_weights=False)[0].squeeze(0)


class Gain(nn.Module):
    """A scalar, an odd vector, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.offset = nn.Parameter(torch.zeros(WIDTH))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.offset


class Recomputed(nn.Module):
    """Activation checkpointing inside a block."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = Mlp()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Counting(nn.Module):
    """Running statistics in a buffer, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.drop = nn.Dropout(0.25)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.1)
        y = self.inner(x - self.mean.to(x.dtype))
        # In one dtype on both sides: on GPUs the mask depends on it.
        return self.drop(y.float()).to(y.dtype)


class RankOnly(nn.Module):
    """Uses a part of its weights on the first rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return x + self.side(x) if dist.get_rank() == 0 else x


class Collecting(nn.Module):
    """Appends an auxiliary loss to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.side = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        losses.append(self.side(x).square().mean())
        return self.inner(x)


def parts_of(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensor and the auxiliary loss of a block's output."""
    if isinstance(output, dict):
        return output["x"], output["aux"]
    if isinstance(output, Named):
        return output.x, output.aux
    return output if isinstance(output, tuple) else (output, None)


class Net(nn.Module):
    """The model of a program: blocks by name, in the order in which they were added."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleDict()
        self.head = nn.Linear(WIDTH, OUTPUTS)
        # Of inputs; None to leave them as they are.
        self.dtype: torch.dtype | None = None

    def forward(
        self, x: torch.Tensor, skip: Collection[str] = (), fail: str = "", repeat: int = 1
    ) -> torch.Tensor:
        """Outputs, to which auxiliary losses are added. skip: names of blocks that are not called;
        fail: of the block before which `Stop` is raised; repeat: how often all blocks run."""
        x = self.enter(x if self.dtype is None else x.to(self.dtype))
        losses: list[torch.Tensor] = []
        for _ in range(repeat):
            for name, block in self.blocks.items():
                if name == fail:
                    raise Stop(f"before {name}")
                if name not in skip:
                    collects = isinstance(block, Collecting)
                    x, aux = parts_of(block(x, losses) if collects else block(x))
                    losses += [] if aux is None else [aux]
        if fail == "the end":
            raise Stop("at the end")
        return self.head(x) + sum(losses)
