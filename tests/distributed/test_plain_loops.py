"""What users of PyTorch do in their own training loops ends in the weights of an unsharded module
whose gradients are averaged over the ranks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import (
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.plain import Block, tokens
from tests.distributed.plain_loops import LOOPS, check_loops
from tests.distributed.plain_side import net


@pytest.mark.parametrize("every", (False, pytest.param(True, marks=pytest.mark.full)))
def test_loops_train_to_the_same_weights(every: bool) -> None:
    run_ranks(functools.partial(check_loops, every=every), 2, list(LOOPS), timeout=400)


@pytest.mark.full
def test_loops_on_three_ranks() -> None:
    names = ("a_rank_without_data", "clipped_by_norms", "some_gradients_taken_away", "adversaries")
    run_ranks(check_loops, 3, names, timeout=400)


@pytest.mark.parametrize(
    "outer_strategy", (pytest.param("no_shard", marks=pytest.mark.full), "optim")
)
def test_a_rank_without_data_with_an_outer_axis(outer_strategy: str) -> None:
    """It meets the others in the order in which they reduce over either axis."""
    names = ("a_rank_without_data", "a_rank_without_microbatches")
    run_ranks(
        functools.partial(check_loops, outer=2, outer_dp_sharding_strategy=outer_strategy),
        4, names, timeout=400,
    )  # fmt: skip


def _errors(rank: int, world: int) -> None:
    for strategy, row in STRATEGIES.items():
        _frozen_when_wrapped(rank, strategy)
        _hooks_that_cannot_run(rank, strategy)
        _foreign_groups(rank, strategy)
        if not row.shard_grads:
            _second_backward(rank, strategy)


def _frozen_when_wrapped(rank: int, strategy: str) -> None:
    module = net()
    module.head.requires_grad_(False)
    model = fully_shard_model(module, None, [Block], data_parallel_sharding_strategy=strategy)
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires_grad of head.weight was set to True.*frozen"):
        model(tokens(0, 0, rank))


def _hooks_that_cannot_run(rank: int, strategy: str) -> None:
    model = fully_shard_model(net(), None, [Block], data_parallel_sharding_strategy=strategy)
    model.get_parameter("module.head.weight").register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match="register_hook on parameter head.weight"):
        model(tokens(0, 0, rank))


def _foreign_groups(rank: int, strategy: str) -> None:
    model = fully_shard_model(net(), None, [Block], data_parallel_sharding_strategy=strategy)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="1 of its .* parameters are not of a sharded model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="norm_type=0"):
        model.clip_grad_norm_(1.0, 0)


def _second_backward(rank: int, strategy: str) -> None:
    """The text tells a user without Megatron what to do."""
    model = fully_shard_model(net(), None, [Block], data_parallel_sharding_strategy=strategy)
    params = list(model.parameters())
    model(tokens(0, 0, rank)).backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\), and clear the gradients") as caught:
        model(tokens(0, 1, rank)).backward()
    assert "zero_grad_buffer" not in str(caught.value)
    for param in params:
        param.grad = None
    model(tokens(0, 1, rank)).backward()


def _outputs_of_written_weights(rank: int, world: int) -> None:
    """In bf16, and with main weights of either dtype: what all ranks compute with right after a
    write, without a step in between."""
    for strategy in STRATEGIES:
        for main in (torch.float32, None):
            model = fully_shard_model(
                net().bfloat16(), None, [Block], data_parallel_sharding_strategy=strategy,
                mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=main),
            )  # fmt: skip
            plain = net().bfloat16()
            params = list(model.parameters())
            for _ in range(3):
                with torch.no_grad():
                    for param in (*params, *plain.parameters()):
                        param.mul_(0.5)  # exact in both dtypes
                    found, expected = (one(tokens(0, 0, 0)) for one in (model, plain))
                assert torch.equal(found, expected), (strategy, main)


def _memory_of_cleared_gradients(rank: int, world: int) -> None:
    """Shards of gradients go with the last gradient in them: at once with the sharded optimizer's
    `zero_grad`, with the next forward otherwise."""
    for strategy in ("optim_grads", "optim_grads_params"):
        model = fully_shard_model(net(), None, [Block], data_parallel_sharding_strategy=strategy)
        params = list(model.parameters())
        first, second = (
            fully_shard_optimizer(torch.optim.SGD(half, lr=0.1))
            for half in (params[::2], params[1::2])
        )
        buffers = [group.grad for group in model.engine.groups]
        model(tokens(0, 0, rank)).backward()
        assert all(buffer.allocated for buffer in buffers)
        first.zero_grad()
        assert all(param.grad is None for param in params[::2])
        assert all(param.grad is not None for param in params[1::2])
        second.zero_grad()
        assert not any(buffer.allocated for buffer in buffers)
        model(tokens(0, 0, rank)).backward()
        torch.optim.SGD(params, lr=0.1).zero_grad()
        with torch.no_grad():
            model(tokens(0, 1, rank))
        assert not any(buffer.allocated for buffer in buffers)


def _step_that_raises(rank: int, world: int) -> None:
    """Afterwards the optimizer has its DTensors again, and goes on."""
    model = fully_shard_model(net(), None, [Block])
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    params = list(optimizer.param_groups[0]["params"])
    model(tokens(0, 0, rank)).backward()
    optimizer.param_groups[0]["lr"] = "nonsense"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad()
    found = optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(params, found, strict=True))
    before = [param.to_local().clone() for param in params]
    model(tokens(0, 0, rank)).backward()
    optimizer.step()
    assert all(
        not torch.equal(old, new.to_local())
        for old, new in zip(before, params, strict=True)
        if old.numel()
    )


def _contracts(rank: int, world: int) -> None:
    _errors(rank, world)
    _outputs_of_written_weights(rank, world)
    _memory_of_cleared_gradients(rank, world)
    _step_that_raises(rank, world)


def test_errors_writes_and_memory_of_plain_loops() -> None:
    """What cannot work is one error; written weights are those of all ranks; cleared gradients take
    no memory; a step that raised leaves the optimizer as it was."""
    run_ranks(_contracts, 2)
