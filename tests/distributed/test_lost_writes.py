"""Programs that write weights where main weights do not see it: the error names the parameter, or
the weights are those of the unsharded model. All ranks have the same data, so that one process
without sharding is the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import (
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.distributed.gpt import full_all
from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.once

WIDTH, STEPS = 6, 3


class Layer(nn.Module):
    """`write` is called in forward, before the weights are read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.book = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.write: Callable[[Layer, torch.Tensor], None] = lambda layer, x: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self, x)
        return x + torch.tanh(self.linear(x)) + self.book


class Block(Layer):
    """A unit; what is of the other class is the root's."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.first(x)).float().square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


Train = Callable[[nn.Module, torch.optim.Optimizer, torch.dtype], None]


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    for step in range(STEPS):
        model(batch(step).to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def written_between(
    params: Callable[[nn.Module], Iterable[nn.Parameter]],
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype,
) -> None:  # fmt: skip
    """After a forward, for a log, that no backward follows."""
    for step in range(STEPS):
        plainly(model, optimizer, dtype)
        model(batch(10 + step).to(dtype))
        with torch.no_grad():
            for param in params(model):
                param.mul_(0.5)


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Only an evaluation writes."""
    for step in range(STEPS):
        plainly(model, optimizer, dtype)
        model.eval()
        with torch.no_grad():
            model(batch(10 + step).to(dtype))
        model.train()


def _clamp(layer: Layer, x: torch.Tensor) -> None:
    layer.linear.weight.clamp_(-0.2, 0.2)


def _scale_data(layer: Layer, x: torch.Tensor) -> None:
    layer.linear.weight.data.mul_(0.9)


def _scale_when_evaluated(layer: Layer, x: torch.Tensor) -> None:
    if not layer.training:
        layer.linear.bias.detach()[1:].mul_(0.5)


def _average(layer: Layer, x: torch.Tensor) -> None:
    layer.book.lerp_(x.mean(0).to(layer.book.dtype), 0.1)


class Program(NamedTuple):
    """write: of the layer called `where`, in each forward. name: of a parameter that is written."""

    write: Callable[[Layer, torch.Tensor], None] | None
    where: str
    name: str
    train: Train = plainly


PROGRAMS: Mapping[str, Program] = {
    "clamped in a unit": Program(_clamp, "layers.1", "layers.1.linear.weight"),
    "data of a unit": Program(_scale_data, "layers.0", "layers.0.linear.weight"),
    "clamped in the root": Program(_clamp, "first", "first.linear.weight"),
    "codebook that is frozen": Program(_average, "layers.0", "layers.0.book"),
    "written in an evaluation": Program(
        _scale_when_evaluated, "layers.1", "layers.1.linear.bias", evaluated
    ),
    "written after a forward for a log": Program(
        None, "", "", functools.partial(written_between, lambda model: model.parameters())
    ),
}
PRECISIONS = {
    "fp32": (torch.float32, MixedPrecisionPolicy()),
    "bf16": (torch.bfloat16, MixedPrecisionPolicy(main_params_dtype=torch.float32)),
}


def made(program: Program, dtype: torch.dtype) -> Model:
    torch.manual_seed(4)
    model = Model().to(dtype)
    if program.write is not None:
        model.get_submodule(program.where).write = program.write  # type: ignore[assignment]
    return model


def reference(program: Program) -> dict[str, torch.Tensor]:
    model = made(program, torch.float32)
    trained = [param for param in model.parameters() if param.requires_grad]
    program.train(model, torch.optim.SGD(trained, lr=0.1), torch.float32)
    return {name: value.detach() for name, value in model.state_dict().items()}


def sharded(program: Program, strategy: str, precision: str) -> dict[str, torch.Tensor]:
    dtype, policy = PRECISIONS[precision]
    model = fully_shard_model(
        made(program, dtype), None, [Block], data_parallel_sharding_strategy=strategy,
        mixed_precision_policy=policy,
    )  # fmt: skip
    trained = [param for param in model.parameters() if param.requires_grad]
    program.train(model, fully_shard_optimizer(torch.optim.SGD(trained, lr=0.1)), dtype)
    state = {name.removeprefix("module."): v for name, v in model.state_dict().items()}
    return full_all(state)


def is_lost(program: Program, strategy: str, precision: str) -> bool:
    """Whether main weights are other memory than what is written."""
    is_cast = precision == "bf16" and not program.name.endswith("book")
    return STRATEGIES[strategy].shard_weights or is_cast


def check_programs(rank: int, world: int) -> None:
    wrong = []
    for what, program in PROGRAMS.items():
        expected = reference(program)
        for strategy in STRATEGIES:
            for precision in PRECISIONS:
                case = f"{what}, {strategy}, {precision}"
                try:
                    found = sharded(program, strategy, precision)
                except RuntimeError as error:
                    named = f"parameter {program.name}" in str(error)
                    if not (is_lost(program, strategy, precision) and named):
                        wrong.append(f"{case}: {error}")
                    continue
                if is_lost(program, strategy, precision):
                    wrong.append(f"{case}: no error")
                elif precision == "fp32":
                    off = max(float((found[k] - v).abs().max()) for k, v in expected.items())
                    if off > 1e-6:
                        wrong.append(f"{case}: off by {off:.1e}")
    assert not wrong, "\n".join(wrong)


def test_a_write_is_an_error_that_names_the_parameter_or_counts() -> None:
    run_ranks(check_programs, 2, timeout=400)
