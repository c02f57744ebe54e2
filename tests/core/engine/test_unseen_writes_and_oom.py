"""What goes wrong in a user's program: weights that are written where main weights do not see it
are an error that names the parameter; running out of memory names the buffer, its unit, and what
the strategy takes. Exceptions in a forward or backward: tests/core/engine/test_engine_scenarios.py;
faults of one rank: test_faults.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import MixedPrecisionPolicy, fully_shard_model
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.lib.plain.plain import Side, net, tokens
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/engine/params.py", "core/engine/gather.py", "build/fault_report.py")

# Writes that main weights do not see. All ranks have the same data, so that one process without
# sharding is the reference.

STEPS = 3
FROZEN = "blocks.0.norm.weight"


def plainly(
    model: Any, optimizer: torch.optim.Optimizer, behind: Callable[[Any, int], None] | None = None
) -> None:
    for step in range(STEPS):
        model(tokens(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if behind is not None:
            behind(model, step)


def _write_between(model: Any, step: int) -> None:
    """After a forward, for a log, that no backward follows."""
    model(tokens(10 + step, 0, 0))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def _evaluate(model: Any, step: int) -> None:
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
    is written. behind: each step."""

    write: Callable[..., None] | None
    where: str
    name: str
    behind: Callable[[Any, int], None] | None = None

    def run(self, side: Side, precision: str = "fp32") -> dict[str, torch.Tensor]:
        dtype, policy = PRECISIONS[precision]
        module = net(dtype, blocks=2)
        module.get_parameter(FROZEN).requires_grad_(False)
        if self.write is not None:
            write = torch.no_grad()(self.write)
            module.get_submodule(self.where).register_forward_pre_hook(write)
        model = side.model(module, mixed_precision_policy=policy)
        trained = [param for param in model.parameters() if param.requires_grad]
        plainly(model, side.optimizer(torch.optim.SGD(trained, lr=0.1)), self.behind)
        return side.weights()

    def is_lost(self, strategy: str, precision: str) -> bool:
        """Whether main weights are other memory than what is written. Behind a forward that was for
        a log, sharded parameters are written."""
        if self.write is None:
            return False
        is_cast = precision == "bf16" and self.name != FROZEN
        return STRATEGIES[strategy].shard_weights or is_cast


PROGRAMS: Mapping[str, Program] = {
    "clamped in a unit": Program(_clamp, "blocks.1.up", "blocks.1.up.weight"),
    "data of a unit": Program(_scale_data, "blocks.0.up", "blocks.0.up.weight"),
    "clamped in the root": Program(_clamp, "head", "head.weight"),
    "codebook that is frozen": Program(_scale, "blocks.0.norm", FROZEN),
    "written in an evaluation": Program(
        _scale_when_evaluated, "blocks.1.up", "blocks.1.up.bias", _evaluate
    ),
    "written after a forward for a log": Program(None, "", "", _write_between),
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
    program = PROGRAMS[what]
    side = Side(rank, world, strategy)
    if program.is_lost(strategy, precision):
        with pytest.raises(RuntimeError, match=f"parameter {program.name}"):
            program.run(side, precision)
        return
    found = program.run(side, precision)
    if precision == "fp32":
        expected = program.run(Side(rank, world, None))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


# Out of memory.


def _no_room(flat: torch.Tensor) -> None:
    """Torch's own error: no machine has so many bytes."""
    flat.untyped_storage().resize_(1 << 60)


def _fails(run: Callable[[], Any], said: str, strategy: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        run()
    for text in (
        f"rank 0: no memory for {said}",
        "can't allocate memory",
        f"strategy {strategy}:",
        "fsdp_unit_modules",
    ):
        assert text in str(caught.value), (text, str(caught.value))


def test_the_message_names_buffer_unit_and_strategy(one_rank: None) -> None:
    """In forward, in backward, at construction; the next step runs."""
    x = torch.ones(3, 4).bfloat16()
    for strategy, what in (
        ("optim_grads_params", "the gathered weights of unit 0"),
        ("optim_grads", "the reduce bucket of unit 1"),
    ):
        made = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).bfloat16()
        model = fully_shard_model(
            made, fsdp_unit_modules=[nn.Linear], data_parallel_sharding_strategy=strategy
        )
        if "gathered" in what:
            run = functools.partial(model, x)
        else:
            run = model(x).sum().backward
        with mock.patch.object(model.engine.runtime, "allocate", _no_room):
            _fails(run, f"{what} (", strategy)
        model.zero_grad()
        model(x).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
    huge = nn.Linear(1 << 25, 1 << 25, device="meta")
    construct = functools.partial(fully_shard_model, huge, init_model_with_meta_device=True)
    _fails(construct, "the buffers of the wrapper at construction", "optim_grads_params")


def test_other_errors_are_left_as_they_are(one_rank: None) -> None:
    model = fully_shard_model(nn.Linear(3, 3))
    fails = mock.Mock(side_effect=RuntimeError("something else"))
    with (
        mock.patch.object(model.engine.runtime, "allocate", fails),
        pytest.raises(RuntimeError, match="^something else"),
    ):
        model(torch.ones(1, 3))
