"""What goes wrong in a user's program: weights that are written where main weights do not see it
are an error that names the parameter; running out of memory names the buffer, its unit, and what
the strategy takes. Exceptions in a forward or backward: tests/engine/test_engine_scenarios.py;
faults of one rank: test_faults.py."""

from __future__ import annotations

import ctypes
import functools
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import MixedPrecisionPolicy, fully_shard_model
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.buffer import FlatBuffer
from tests.distributed.launch import run_ranks
from tests.distributed.plain import Side, net, tokens
from tests.distributed.shared_ranks import on_ranks

# Writes that main weights do not see. All ranks have the same data, so that one process without
# sharding is the reference.

STEPS = 3
FROZEN = "blocks.0.norm.weight"

Train = Callable[[Any, torch.optim.Optimizer], None]


def plainly(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        model(tokens(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def written_between(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """After a forward, for a log, that no backward follows."""
    for step in range(STEPS):
        plainly(model, optimizer)
        model(tokens(10 + step, 0, 0))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)


def evaluated(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Only an evaluation writes."""
    for step in range(STEPS):
        plainly(model, optimizer)
        model.eval()
        with torch.no_grad():
            model(tokens(10 + step, 0, 0))
        model.train()


def _clamp(module: Any, *given: Any) -> None:
    module.weight.clamp_(-0.2, 0.2)


def _scale(module: Any, *given: Any) -> None:
    module.weight.mul_(0.9)


def _scale_data(module: Any, *given: Any) -> None:
    module.weight.data.mul_(0.9)


def _scale_when_evaluated(module: Any, *given: Any) -> None:
    if not module.training:
        module.bias.detach()[1:].mul_(0.5)


class Program(NamedTuple):
    """write: of the module called `where`, before each of its forwards. name: of a parameter that
    is written."""

    write: Callable[..., None] | None
    where: str
    name: str
    train: Train = plainly

    def run(self, side: Side, precision: str = "fp32") -> dict[str, torch.Tensor]:
        dtype, policy = PRECISIONS[precision]
        module = net(dtype, blocks=2)
        module.get_parameter(FROZEN).requires_grad_(False)
        if self.write is not None:
            write = torch.no_grad()(self.write)
            module.get_submodule(self.where).register_forward_pre_hook(write)
        model = side.model(module, mixed_precision_policy=policy)
        trained = [param for param in model.parameters() if param.requires_grad]
        self.train(model, side.optimizer(torch.optim.SGD(trained, lr=0.1)))
        return side.weights()

    def is_lost(self, strategy: str, precision: str) -> bool:
        """Whether main weights are other memory than what is written."""
        is_cast = precision == "bf16" and self.name != FROZEN
        return STRATEGIES[strategy].shard_weights or is_cast


PROGRAMS: Mapping[str, Program] = {
    "clamped in a unit": Program(_clamp, "blocks.1.up", "blocks.1.up.weight"),
    "data of a unit": Program(_scale_data, "blocks.0.up", "blocks.0.up.weight"),
    "clamped in the root": Program(_clamp, "head", "head.weight"),
    "codebook that is frozen": Program(_scale, "blocks.0.norm", FROZEN),
    "written in an evaluation": Program(
        _scale_when_evaluated, "blocks.1.up", "blocks.1.up.bias", evaluated
    ),
    "written after a forward for a log": Program(None, "", "", written_between),
}
PRECISIONS = {
    "fp32": (torch.float32, MixedPrecisionPolicy()),
    "bf16": (torch.bfloat16, MixedPrecisionPolicy(main_params_dtype=torch.float32)),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", PROGRAMS)
@on_ranks(2)
def test_a_write_is_an_error_that_names_the_parameter_or_counts(
    rank: int, world: int, what: str, strategy: str, precision: str
) -> None:
    program, side = PROGRAMS[what], Side(rank, world, strategy)
    if program.is_lost(strategy, precision):
        with pytest.raises(RuntimeError, match=f"parameter {program.name}"):
            program.run(side, precision)
        return
    found = program.run(side, precision)
    if precision == "fp32":
        expected = program.run(Side(rank, world, None))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


# Out of memory.

WIDE = 2048
"""A weight of this width squared has 16 MiB, more than the room that is left."""
M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


@contextmanager
def little_room(mebibytes: int) -> Iterator[None]:
    """Inside, the process may map that much more than it has."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + mebibytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2))


def _fails(run: Any, said: str, mebibytes: int = 8) -> None:
    with little_room(mebibytes), pytest.raises(RuntimeError) as caught:
        run()
    for text in (said, "can't allocate memory", "optim_grads", "fsdp_unit_modules"):
        assert text in str(caught.value), (text, str(caught.value))


def _runs_out(rank: int, world: int) -> None:
    # From now on the C library keeps nothing of 1 MiB or more that was freed, whose reuse no limit
    # would see: by default it learns to, from the first large block on.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1
    sharded = functools.partial(fully_shard_model, fsdp_unit_modules=[nn.Linear])
    model, x = sharded(_wide()), torch.ones(3, 4)
    _fails(lambda: model(x), "rank 0: no memory for the gathered weights of unit 1 (0.016 GiB")
    _trains_on(model, x)
    narrow, x = _wide().bfloat16(), x.bfloat16()
    model = sharded(narrow, data_parallel_sharding_strategy="optim_grads")
    loss = model(x).sum()
    said = "rank 0: no memory for the reduce bucket of unit 1 (0.016 GiB"
    _fails(loss.backward, said, mebibytes=20)  # the weight gradient, of 8 MiB, comes first
    _trains_on(model, x)
    again = _wide()
    _fails(lambda: sharded(again), "no memory for the buffers of the wrapper at construction")


def _trains_on(model: nn.Module, x: torch.Tensor) -> None:
    """After a failure of either kind the next step runs."""
    model.zero_grad()
    model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_the_message_names_buffer_unit_and_strategy() -> None:
    """With a real limit of the operating system: in forward, in backward, at construction."""
    run_ranks(_runs_out, 1)


def test_other_errors_are_left_as_they_are(one_rank: None) -> None:
    model = fully_shard_model(nn.Linear(3, 3))
    [group] = model.engine.groups
    with pytest.raises(RuntimeError, match="something else"):
        model.engine.runtime.on_out_of_memory("weights", group.weights[0].tensor, RuntimeError("x"))
        raise RuntimeError("something else")
    assert isinstance(group.weights[0], FlatBuffer)
