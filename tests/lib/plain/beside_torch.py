"""A few steps of training, with numbers to compare with those of torch's `fully_shard`; and
parameters that are to be what torch's are. A model and a placement for such tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.lib.gpt.checks import check_same_bits

STEPS = 3
VOCAB = 20


class TiedNet(nn.Module):
    """Layers between an embedding and an output layer, which share a weight."""

    def __init__(self, layer: Callable[[], nn.Module], layers: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.out = nn.Linear(width, VOCAB, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class NormedLayer(nn.Module):
    """A norm and an MLP, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def last_dim(param: nn.Parameter) -> Shard | None:
    """A `shard_placement_fn` that splits the last dim, of all but vectors."""
    return Shard(-1) if param.ndim > 1 else None


def norms_of(net: Any) -> list[float]:
    """The norm of all gradients, which are clipped; over several meshes that of each."""
    params = [param for param in net.parameters() if param.grad is not None]
    if all(param.device_mesh == params[0].device_mesh for param in params):
        norm: Any = nn.utils.clip_grad_norm_(params, 0.5)
        return [norm.full_tensor().item()]
    return [param.grad.norm().full_tensor().item() for param in params]


def nothing() -> Sequence[float]:
    """No numbers."""
    return ()


def trained(
    net: Any,
    loss_of: Callable[[int, int], torch.Tensor],
    microbatches: int = 1,
    first: int = 0,
    keeps: bool = True,
    norms: Callable[[Any], Sequence[float]] = norms_of,
    after: Callable[[], Sequence[float]] = nothing,
    steps: int = STEPS,
    **adam: Any,
) -> tuple[torch.optim.Optimizer, list[float]]:
    """Trains `net`. Returns the optimizer, and all losses and norms.

    loss_of: the loss of a step and a microbatch. first: the number of the first step. keeps:
    gradients stay unsharded until the last microbatch; else each reduces. after: gives more numbers
    when a step has ended.
    """
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **adam)
    found = []
    for step in range(first, first + steps):
        for microbatch in range(microbatches):
            if keeps:
                net.set_requires_gradient_sync(microbatch == microbatches - 1)
            loss = loss_of(step, microbatch)
            loss.backward()
            whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
            found.append(whole.item())
        found += norms(net)
        optimizer.step()
        optimizer.zero_grad()
        found += after()
    return optimizer, found


def plain(local: Any) -> torch.Tensor:
    """The values of a local tensor, which may be of a class with one plain tensor in it."""
    return vars(local).get("inner", local).detach()


def check_alike(found: Any, expected: Any, say: str = "") -> None:
    """The parameters of two models are the same DTensors: in names, places, and this rank's part,
    its class, strides and bits."""
    others = dict(expected.named_parameters())
    assert [name for name, _ in found.named_parameters()] == [*others], say
    for name, param in found.named_parameters():
        like = others[name]
        assert type(param) is DTensor, (say, name)
        assert param.requires_grad == like.requires_grad, (say, name)
        assert param.placements == like.placements, (say, name)
        assert param.device_mesh.mesh.equal(like.device_mesh.mesh), (say, name)
        assert param.device_mesh.mesh_dim_names == like.device_mesh.mesh_dim_names, (say, name)
        mine, others_part = param._local_tensor, like._local_tensor
        assert type(mine) is type(others_part), (say, name)
        assert mine.stride() == others_part.stride(), (say, name)
        check_same_bits({name: plain(mine)}, {name: plain(others_part)}, say)
