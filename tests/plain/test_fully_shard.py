"""Plain PyTorch modules, without Megatron: what `fully_shard_model` and `fully_shard_optimizer`
promise beside the weights that loops train to (test_plain_loops.py)."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import (
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.lib.plain.plain import Block, net, tokens
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("plain/fully_shard.py", "plain/building.py", "plain/optimizer.py", "build/guards.py")

BF16 = torch.bfloat16
KEPT_GRADS = [name for name, row in STRATEGIES.items() if not row.shard_grads]
SHARDED_GRADS = [name for name, row in STRATEGIES.items() if row.shard_grads]


def sharded(strategy: str, module: nn.Module | None = None, **options: Any) -> Any:
    return fully_shard_model(
        module or net(), None, [Block], data_parallel_sharding_strategy=strategy, **options
    )


def sgd(params: Any) -> Any:
    return fully_shard_optimizer(torch.optim.SGD(params, lr=0.1))


# What is refused.


WRAPPED = "sharded already. Wrap a module once"
OFFLOAD = "chunked_optimizer_state_offload=True with optimizer="
Use = Callable[[Any], Any]
REFUSED: list[tuple[str, type[Exception], Use]] = [(WRAPPED, ValueError, fully_shard_model)]
"""What the error says, its class, and what raises it on a sharded model."""


def refused(said: str, error: type[Exception] = ValueError) -> Callable[[Use], Use]:
    """Adds a function to the table."""

    def add(use: Use) -> Use:
        REFUSED.append((said, error, use))
        return use

    return add


@refused(WRAPPED)
def _module_of_a_model(model: Any) -> None:
    fully_shard_model(model.module)


@refused("5 of its 5 parameters are not from a sharded model")
def _parameters_of_another_module(model: Any) -> None:
    params = list(Block().parameters())
    sgd(params[:5])


@refused("sharded already")
def _optimizer_again(model: Any) -> None:
    fully_shard_optimizer(sgd(model.parameters()))


@refused("Adafactor: its step needs whole tensors")
def _optimizer_of_whole_tensors(model: Any) -> None:
    fully_shard_optimizer(torch.optim.Adafactor(model.parameters()))


@refused("Convert the module before wrapping", RuntimeError)
def _converted(model: Any) -> None:
    model.half()


@refused("no module of Net is a Conv2d")
def _no_such_unit(model: Any) -> None:
    fully_shard_model(net(), None, [nn.Conv2d])


@refused("there is no outer axis")
def _no_outer_axis(model: Any) -> None:
    fully_shard_model(net(), outer_dp_sharding_strategy="optim")


@refused("parameter temperature is torch.float32")
def _narrow_main_weights(model: Any) -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=BF16)
    fully_shard_model(net(), mixed_precision_policy=policy)


@refused("head.weight was set to True.*main weights are in torch.bfloat16", RuntimeError)
def _frozen_when_wrapped(model: Any) -> None:
    module = net(BF16)
    module.head.requires_grad_(False)
    frozen = sharded(model.engine.config.strategy.name, module)
    frozen.requires_grad_(True)
    frozen(tokens(0, 0, 0))


@refused("register_hook on parameter head.weight", RuntimeError)
def _hook_on_a_parameter(model: Any) -> None:
    model.get_parameter("module.head.weight").register_hook(lambda grad: grad)
    model(tokens(0, 0, 0))


@refused("1 of its .* parameters are not from a sharded model")
def _foreign_group(model: Any) -> None:
    optimizer = sgd(model.parameters())
    try:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    finally:
        assert len(optimizer.param_groups) == 1


@refused("norm_type=0")
def _norm_of_order_zero(model: Any) -> None:
    model.clip_grad_norm_(1.0, 0)


def _offloaded(model: Any, make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, Any]:
    strategy = model.engine.config.strategy.name
    offloaded = sharded(strategy, net(BF16), chunked_optimizer_state_offload=True)
    return offloaded, fully_shard_optimizer(make(offloaded.parameters()))


@refused(f"{OFFLOAD}SGD")
def _offloaded_sgd(model: Any) -> None:
    _offloaded(model, torch.optim.SGD)


@refused(f"{OFFLOAD}NAdam")
def _offloaded_nadam(model: Any) -> None:
    _offloaded(model, torch.optim.NAdam)


def _matrices(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.dim() != 1])


@refused("add_param_group with chunked_optimizer_state_offload")
def _group_of_an_offloaded_optimizer(model: Any) -> None:
    offloaded, optimizer = _offloaded(model, _matrices)
    vectors = [param for param in offloaded.parameters() if param.dim() == 1]
    optimizer.add_param_group({"params": vectors})
    offloaded(tokens(0, 0, 0)).backward()
    optimizer.step()


@refused("True for some models")
def _offload_of_one_of_two(model: Any) -> None:
    offloaded, _ = _offloaded(model, torch.optim.AdamW)
    both = nn.ModuleList([model, offloaded])
    fully_shard_optimizer(torch.optim.AdamW(both.parameters()))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("said", "error", "use"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_cannot_work_is_an_error(
    one_rank: None, said: str, error: type[Exception], use: Callable[[Any], Any], strategy: str
) -> None:
    with pytest.raises(error, match=said):
        use(sharded(strategy))


@pytest.mark.parametrize("strategy", KEPT_GRADS)
@on_ranks(2)
def test_a_second_backward_needs_no_sync_where_gradients_are_kept(rank: int, strategy: str) -> None:
    """The text tells a user without Megatron what to do; a loop that does so goes on. With sharded
    gradients it counts (`plain_loops.py`)."""
    model = sharded(strategy)
    params = list(model.parameters())
    model(tokens(0, 0, rank)).backward()
    said = r"a backward ran after this step's gradients.*no_sync\(\), and set all gradients to None"
    with pytest.raises(RuntimeError, match=said) as caught:
        model(tokens(0, 1, rank)).backward()
    assert "zero_grad_buffer" not in str(caught.value)
    for param in params:
        param.grad = None
    model(tokens(0, 1, rank)).backward()


# What holds on two ranks, under every strategy.


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_appear_when_they_are_asked_for(rank: int, strategy: str) -> None:
    """Without automatic synchronization: by `sync`, by `finish_grad_sync`, or by the step."""
    model = sharded(strategy, sync_model_each_microbatch=False)
    optimizer = sgd(model.parameters())
    before = model.full_state_dict()
    model(tokens(0, 0, rank)).backward()
    for param in model.parameters():
        assert param.grad is None
    optimizer.step()
    for n, v in model.full_state_dict().items():
        assert not torch.equal(v, before[n])
    optimizer.zero_grad()
    with model.sync():
        model(tokens(0, 0, rank)).backward()
    for p in model.parameters():
        assert p.grad is p.decoupled_grad is not None
    model.zero_grad()
    for p in model.parameters():
        assert p.grad is p.decoupled_grad is None
    model.set_model_auto_sync()
    model(tokens(0, 0, rank)).backward()
    for param in model.parameters():
        assert param.grad is not None


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_that_are_not_finite(rank: int, strategy: str) -> None:
    """On one rank, they are in the norm of all, as with torch. A maximum over ranks drops NaN."""
    model = sharded(strategy)
    for cell in itertools.product((torch.nan, torch.inf), range(2), (torch.inf, 1.0, 2.0)):
        bad, where, norm_type = cell
        model(tokens(0, 0, rank)).backward()
        if rank == where or strategy == "no_shard":
            grads = [p.grad._local_tensor for p in model.parameters()]
            next(grad for grad in grads if grad.numel()).view(-1)[0] = bad
        norm = model.clip_grad_norm_(1.0, norm_type)
        torch.testing.assert_close(norm, torch.tensor(bad), equal_nan=True, msg=str(cell))
        model.zero_grad()


@on_ranks(2)
def test_a_norm_under_another_default_dtype(rank: int) -> None:
    """Of a gradient that one rank has none of."""
    made = fully_shard_model(nn.Linear(3, 1, bias=False), None, [])
    made(torch.ones(2, 3)).sum().backward()
    torch.set_default_dtype(BF16)
    try:
        norm = made.clip_grad_norm_(1e9)
    finally:
        torch.set_default_dtype(torch.float32)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(2 * 3**0.5, rel=1e-6)


@pytest.mark.parametrize("strategy", SHARDED_GRADS)
@on_ranks(2)
def test_memory_of_cleared_gradients(rank: int, strategy: str) -> None:
    """Shards of gradients go with the last gradient in them: at once with the sharded optimizer's
    `zero_grad`, with the next forward otherwise."""
    model = sharded(strategy)
    params = list(model.parameters())
    first = sgd(params[::2])
    second = sgd(params[1::2])
    buffers = [group.grads.main for group in model.engine.groups]
    model(tokens(0, 0, rank)).backward()
    for buffer in buffers:
        assert buffer.allocated
    first.zero_grad()
    for param in params[::2]:
        assert param.grad is None
    for param in params[1::2]:
        assert param.grad is not None
    second.zero_grad()
    for buffer in buffers:
        assert not buffer.allocated
    model(tokens(0, 0, rank)).backward()
    torch.optim.SGD(params, lr=0.1).zero_grad()
    with torch.no_grad():
        model(tokens(0, 1, rank))
    for buffer in buffers:
        assert not buffer.allocated


BLOCKS = ["blocks.0", "blocks.1", "blocks.2", "root"]
UNITS: Mapping[str, tuple[Callable[[], nn.Module], Any, list[str], str]] = {
    "not given": (net, None, BLOCKS, "4 units (3 Block, root) of at most "),
    "a name": (net, ["Block"], BLOCKS, ""),
    "none": (net, [], ["root"], ""),
    "one": (Block, None, ["root"], "1 unit, whose weights, 0.000 GiB, are gathered"),
}
"""A module, the classes of units that are given, which units there are, and what is printed."""


@pytest.mark.parametrize("name", UNITS)
@on_ranks(2)
def test_units_of_classes_that_are_not_given_or_given_as_strings(rank: int, name: str) -> None:
    """The first rank prints which there are, in one line."""
    make, classes, units, said = UNITS[name]
    with redirect_stdout(io.StringIO()) as printed:
        model = fully_shard_model(make(), fsdp_unit_modules=classes)
    assert [unit.name for unit in model.engine.units] == units
    lines = printed.getvalue().splitlines()
    assert [said in line for line in lines] == [True] * (bool(said) and rank == 0)


# One rank, or no process group.


def test_attributes_that_a_user_has_put_on_parameters_stay_on_them(one_rank: None) -> None:
    """Parameter groups are made by them."""
    module = net()
    module.head.weight._no_weight_decay = True
    module.temperature.lr_scale = 0.5
    params = dict(sharded("optim", module).named_parameters())
    assert params["module.head.weight"]._no_weight_decay is True
    assert params["module.temperature"].lr_scale == 0.5
    assert not hasattr(params["module.embedding.weight"], "_no_weight_decay")


WITHOUT_MEGATRON = """
import sys
sys.modules["megatron"] = None  # as where megatron-core is not installed
from megatron_fsdp_adapter import (
    MixedPrecisionPolicy, export_shards, export_weights, fully_shard, fully_shard_model,
    fully_shard_optimizer, leave_fsdp2, release_memory, return_memory, use_as_fsdp2,
)
try:
    from megatron_fsdp_adapter import FullyShardedDataParallel
except ModuleNotFoundError as error:
    print(error)
"""


def test_plain_modules_need_no_megatron_and_the_wrapper_says_what_it_needs() -> None:
    command = [sys.executable, "-c", WITHOUT_MEGATRON]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == (
        "megatron_fsdp_adapter.FullyShardedDataParallel: megatron-core is not installed. Install "
        "megatron-fsdp-adapter[megatron].\n"
    ), done.stderr
