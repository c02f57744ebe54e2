"""The parameters that modules show at each moment of a step, sharded or not, are those that torch's
`fully_shard` shows. Losses, norms and weights have its bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter import fully_shard as ours
from tests.lib.gpt.gpt import full
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "core/engine/params.py",
    "core/engine/unit.py",
    "plain/fsdp2.py",
    "plain/fsdp2_model.py",
    "plain/shown.py",
    "plain/writes.py",
)

WIDTH = 6
STEPS = 2

Moments = list[tuple[str, dict[str, str]]]
"""What was going on, and by the name of a parameter, what its module has shown."""


class Layer(nn.Module):
    """A layer that tells when it begins and ends, and when its backward is under way."""

    tell: Callable[[str], None]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tell(f"{self.name} begins")
        hidden = torch.tanh(self.up(x))
        self.tell(f"{self.name} goes on")
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.tell(f"backward of {self.name}"))
        x = x + self.down(hidden)
        self.tell(f"{self.name} ends")
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(f"layer {number}") for number in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.raises = False
        self.moments: Moments = []
        self.losses: list[torch.Tensor] = []
        for layer in self.layers:
            layer.tell = self.tell  # type: ignore[assignment]

    def tell(self, moment: str) -> None:
        shown = {}
        for name, module in self.named_modules():
            for key in dict.keys(module._parameters):  # a list of parameters would change them
                kind = "sharded" if isinstance(getattr(module, key), DTensor) else "unsharded"
                shown[f"{name}.{key}"] = kind
        self.moments.append((moment, shown))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tell("the model begins")
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            self.tell("between layers")
        if self.raises:
            raise KeyError
        out = self.head(self.norm(x)).square().mean()
        self.tell("the model ends")
        self.losses.append(out.detach())
        return out


def _layers(shard: Any, made: Any, inner: Any, outer: Any) -> None:
    for layer in made.layers:
        shard(layer, **inner)
    shard(made, **outer)


def _nested(shard: Any, made: Any, inner: Any, outer: Any) -> None:
    shard(made.layers[0].up, **inner)
    shard(made.layers[2].down, **inner)
    _layers(shard, made, inner, outer)


def _lists(shard: Any, made: Any, inner: Any, outer: Any) -> None:
    shard(made.layers[0], **inner)
    shard([made.norm, made.head], **inner)
    shard(made, **outer)


def _one(shard: Any, made: Any, inner: Any, outer: Any) -> None:
    shard(made, **outer)


STAYS = {"reshard_after_forward": False}
GOES = {"reshard_after_forward": True}

# fmt: off
MODELS: dict[str, tuple[Callable[..., None], dict[str, bool], dict[str, bool]]] = {
    "layers": (_layers, {}, {}),
    "layers that stay": (_layers, STAYS, {}),
    "a root that goes": (_layers, {}, GOES),
    "nested": (_nested, {}, {}),
    "nested that stay, and a root that goes": (_nested, STAYS, GOES),
    "lists": (_lists, {}, {}),
    "lists that stay": (_lists, STAYS, GOES),
    "one": (_one, {}, {}),
}
# fmt: on


def _data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7 * step + rank))


def _trained(shard: Any, kind: str, rank: int) -> tuple[Moments, list[Any]]:
    """Two microbatches a step, the first of which is reduced or not."""
    build, inner, outer = MODELS[kind]
    made: Any = Model()
    build(shard, made, inner, outer)
    made.tell("sharded")
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    numbers = []
    for step in range(STEPS):
        for microbatch in range(2):
            made.set_requires_gradient_sync(step == 0 or microbatch == 1)
            loss = made(_data(2 * step + microbatch, rank))
            made.tell("after forward")
            loss.backward()
            made.tell("after backward")
            numbers.append(loss.detach())
        numbers.append(full(nn.utils.clip_grad_norm_(made.parameters(), 0.1)))
        made.tell("after clipping")
        optimizer.step()
        optimizer.zero_grad()
        made.tell("after a step")
    numbers += [full(param).detach() for param in made.parameters()]
    return made.moments, numbers


def _same(found: Moments, expected: Moments) -> None:
    assert [moment for moment, _ in found] == [moment for moment, _ in expected]
    for number, ((moment, shown), (_, of_torch)) in enumerate(zip(found, expected, strict=True)):
        other = {name: kind for name, kind in shown.items() if kind != of_torch[name]}
        assert not other, f"moment {number}, {moment}: {other}"


@pytest.mark.parametrize("kind", MODELS)
@on_ranks(2)
def test_modules_show_what_they_show_under_torch(rank: int, kind: str) -> None:
    expected, numbers = _trained(theirs, kind, rank)
    shown, found = _trained(ours, kind, rank)
    _same(shown, expected)
    assert all(map(torch.equal, found, numbers))


def _evaluates(made: Any, rank: int) -> None:
    """Between a forward and its backward, too."""
    for _ in range(2):
        loss = made(_data(0, rank))
        with torch.no_grad():
            made(_data(1, rank))
            made.tell("after an evaluation")
        loss.backward()
        made.tell("after backward")
    with torch.no_grad():
        made.layers[1](_data(2, rank))
    made.tell("after an evaluation of a layer")


def _unshards(made: Any, rank: int) -> None:
    """By hand, before a forward, within its own, and to look at weights."""
    made(_data(0, rank)).backward()
    inner, outer = made.layers[1], made.layers[0]
    handle = inner.unshard(async_op=True)
    made.tell("unsharding")
    handle.wait()
    made.tell("unsharded")
    outer.unshard()
    made.tell("both")
    inner.reshard()
    made.tell("resharded")
    loss = made(_data(1, rank))
    made.tell("after forward")
    inner.unshard()
    made.tell("unsharded before backward")
    inner.reshard()
    made.tell("resharded before backward")
    inner.unshard()
    loss.backward()
    made.tell("after backward")
    made.unshard()
    made.tell("the root")
    made.reshard()
    made.tell("none")


def _raises(made: Any, rank: int) -> None:
    made(_data(0, rank)).backward()
    made.raises = True
    with suppress(KeyError):
        made(_data(1, rank))
    made.tell("after an exception")
    made.reset_iter_state()
    made.tell("after a reset")
    made.zero_grad()
    made.raises = False
    made(_data(2, rank)).backward()
    made.tell("after backward")


def _settings(made: Any, rank: int) -> None:
    made.layers[1].set_reshard_after_forward(False)
    for _ in range(2):
        loss = made(_data(0, rank))
        made.tell("after forward")
        loss.backward()
        made.tell("after backward")
    made.layers[1].set_reshard_after_forward(True)
    made.layers[2].set_reshard_after_backward(False)
    made.set_requires_gradient_sync(False)
    made.zero_grad()
    for _ in range(2):
        loss = made(_data(0, rank))
        made.tell("after forward")
        loss.backward()
        made.tell("after backward")


def _writes(made: Any, rank: int) -> None:
    """Weights of a layer that has not run yet, in a forward and between two."""

    def write(module: Any, *_: Any) -> None:
        with torch.no_grad():
            made.layers[2].up.weight.mul_(0.5)
            made.layers[0].down.bias.add_(1.0) if not torch.is_grad_enabled() else None

    hook = made.layers[1].register_forward_pre_hook(write)
    with torch.no_grad():
        made(_data(1, rank))
    made(_data(0, rank))
    hook.remove()
    made(_data(0, rank)).backward()


PROGRAMS = {
    "evaluates": _evaluates, "unshards": _unshards, "raises": _raises, "settings": _settings,
    "writes": _writes,
}  # fmt: skip
if not hasattr(FSDPModule, "reset_iter_state"):
    del PROGRAMS["raises"]  # torch 2.11 stays in the middle of the pass


@pytest.mark.parametrize("kind", ["a root that goes", "nested"])
@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_programs_see_what_they_see_under_torch(rank: int, program: str, kind: str) -> None:
    found = []
    for shard in (theirs, ours):
        build, inner, outer = MODELS[kind]
        made: Any = Model()
        build(shard, made, inner, outer)
        outputs = made.losses
        PROGRAMS[program](made, rank)
        for module in made.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for param in made.parameters():
            outputs += [param.grad.full_tensor()] if param.grad is not None else []
        outputs += [full(param).detach() for param in made.parameters()]
        found.append((made.moments, outputs))
    (expected, numbers), (shown, own) = found
    _same(shown, expected)
    for number, (value, of_torch) in enumerate(zip(own, numbers, strict=True)):
        assert torch.equal(value, of_torch), f"number {number}: {value}, {of_torch}"
