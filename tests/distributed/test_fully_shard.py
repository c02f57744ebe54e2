"""Plain PyTorch modules, without Megatron: `fully_shard_model` and `fully_shard_optimizer`."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import (
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.distributed.gpt import full_all
from tests.distributed.launch import run_ranks
from tests.distributed.plain import Block, net, tokens

STEPS = 4
LR = 1e-2

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]

OPTIMIZERS: Optimizers = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=LR),
    "SGD": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=LR),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=LR, momentum=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=LR),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=LR),
}


def single_process(
    make: Callable[[Any], torch.optim.Optimizer], world: int, microbatches: int, clip: float | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Mean loss of each step over all ranks' data, and the weights after the last."""
    model = net()
    optimizer = make(model.parameters())
    losses = []
    for step in range(STEPS):
        total = 0.0
        for microbatch in range(microbatches):
            for rank in range(world):
                loss = model(tokens(step, microbatch, rank)) / (world * microbatches)
                loss.backward()
                total += loss.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def sharded(rank: int, make: Any, microbatches: int, clip: float | None, **options: Any) -> Any:
    """The same by a sharded model: losses, full weights, model and optimizer; collective."""
    options = {"fsdp_unit_modules": [Block, nn.Embedding], **options}
    model = fully_shard_model(net(), **options)
    optimizer = fully_shard_optimizer(make(model.parameters()))
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            context: AbstractContextManager[None] = nullcontext() if last else model.no_sync()
            with context:
                loss = model(tokens(step, microbatch, rank)) / microbatches
                loss.backward()
            total += loss.detach()
        if clip is not None:
            model.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses, full_weights(model), model, optimizer


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """By the module's own names; collective."""
    values = {n.removeprefix("module."): v for n, v in model.state_dict().items()}
    return full_all(values)


def _same(found: Any, expected: Any, label: Any, rtol: float = 2e-5) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5), label
    assert found[1].keys() == expected[1].keys(), label
    for name, value in expected[1].items():
        error = (found[1][name] - value).norm() / value.norm()
        assert error <= rtol, (label, name, float(error))


def _every_strategy(rank: int, world: int) -> None:
    for microbatches, clip in ((1, None), (3, 0.5)):
        expected = single_process(OPTIMIZERS["AdamW"], world, microbatches, clip)
        for strategy in STRATEGIES:
            found = sharded(
                rank, OPTIMIZERS["AdamW"], microbatches, clip,
                data_parallel_sharding_strategy=strategy,
            )  # fmt: skip
            _same(found, expected, (strategy, microbatches, clip))
            assert expected[0][-1] < expected[0][0]


@pytest.mark.parametrize("world", (1, 2))
def test_a_plain_model_trains_like_a_single_process(world: int) -> None:
    """Show 6. Losses and weights of 4 steps, with and without microbatches and clipping."""
    run_ranks(_every_strategy, world)


def _every_optimizer(rank: int, world: int) -> None:
    for name, make in OPTIMIZERS.items():
        expected = single_process(make, world, 2, None)
        _same(sharded(rank, make, 2, None), expected, name)


def _hybrid(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    expected = single_process(OPTIMIZERS["AdamW"], world, 2, 0.5)
    outer_rows = ("optim", "no_shard", "optim", "optim")
    for strategy, outer in zip(STRATEGIES, outer_rows, strict=True):
        found = sharded(
            rank, OPTIMIZERS["AdamW"], 2, 0.5, mesh=mesh,
            data_parallel_sharding_strategy=strategy, outer_dp_sharding_strategy=outer,
        )  # fmt: skip
        _same(found, expected, (strategy, outer))


def test_over_a_mesh_of_two_dims() -> None:
    run_ranks(_hybrid, 4)


def _habits(rank: int, world: int) -> None:
    _plain_accumulation(rank, world)
    _explicit_sync(rank, world)
    _state_dicts(rank, world)
    _exclusive(rank, world)


def _plain_accumulation(rank: int, world: int) -> None:
    """Several backwards before a step without saying so: right with sharded gradients, an error
    where kept gradients have been reduced."""
    for strategy, row in STRATEGIES.items():
        model = fully_shard_model(net(), None, [Block], data_parallel_sharding_strategy=strategy)
        model(tokens(0, 0, rank)).backward()
        if not row.shard_grads:
            with pytest.raises(RuntimeError, match="a backward ran after this step's gradients"):
                model(tokens(0, 1, rank)).backward()
            continue
        model(tokens(0, 1, rank)).backward()
        grads = full_all({n.removeprefix("module."): p.grad for n, p in model.named_parameters()})
        plain = net()
        for microbatch in range(2):
            for other in range(world):
                (plain(tokens(0, microbatch, other)) / world).backward()
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad.view(grads[name].shape))


def _explicit_sync(rank: int, world: int) -> None:
    """Without automatic synchronization gradients appear when they are asked for: by `sync`, by
    `finish_grad_sync`, or by the step."""
    for strategy in STRATEGIES:
        model = fully_shard_model(
            net(), None, [Block], data_parallel_sharding_strategy=strategy,
            sync_model_each_microbatch=False,
        )  # fmt: skip
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=LR))
        before = full_weights(model)
        model(tokens(0, 0, rank)).backward()
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        assert all(not torch.equal(v, before[n]) for n, v in full_weights(model).items()), strategy
        optimizer.zero_grad()
        with model.sync():
            model(tokens(0, 0, rank)).backward()
        assert all(p.grad is p.decoupled_grad is not None for p in model.parameters()), strategy
        model.zero_grad()
        assert all(p.grad is p.decoupled_grad is None for p in model.parameters()), strategy
        model.set_model_auto_sync()
        model(tokens(0, 0, rank)).backward()
        assert all(param.grad is not None for param in model.parameters()), strategy


def _state_dicts(rank: int, world: int) -> None:
    """What one model and optimizer give, others of the same kind take, and go on alike."""
    for kind in ("AdamW", "SGD"):
        _, weights, model, optimizer = sharded(rank, OPTIMIZERS[kind], 1, None)
        copy = fully_shard_model(net(), None, [Block, nn.Embedding])
        other = fully_shard_optimizer(OPTIMIZERS[kind](copy.parameters()))
        copy.load_state_dict({n.removeprefix("module."): v for n, v in weights.items()})
        other.load_state_dict(optimizer.state_dict())
        for trained, stepping in ((model, optimizer), (copy, other)):
            trained(tokens(99, 0, rank)).backward()
            stepping.step()
        one, two = full_weights(model), full_weights(copy)
        assert all(torch.equal(value, two[name]) for name, value in one.items()), kind
        for param in model.parameters():
            for value in optimizer.state[param].values():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    assert value.shape == param.shape, kind
                    assert value._local_tensor.shape == param._local_tensor.shape, kind


def _exclusive(rank: int, world: int) -> None:
    model = fully_shard_model(net(), None, [Block])
    for again in (model, model.module):
        with pytest.raises(ValueError, match="sharded already; wrap a module once"):
            fully_shard_model(again)
    with pytest.raises(ValueError, match="5 of its 5 parameters are not of a sharded model"):
        fully_shard_optimizer(torch.optim.SGD(list(Block().parameters())[:5], lr=LR))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard_optimizer(optimizer)
    with pytest.raises(ValueError, match="Adafactor: its step needs whole tensors"):
        fully_shard_optimizer(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(RuntimeError, match="convert the module before wrapping"):
        model.half()
    with pytest.raises(ValueError, match="no module of Net is a Conv2d"):
        fully_shard_model(net(), None, [nn.Conv2d])
    with pytest.raises(ValueError, match="there is no outer axis"):
        fully_shard_model(net(), outer_dp_sharding_strategy="optim")
    with pytest.raises(ValueError, match="parameter temperature is torch.float32"):
        fully_shard_model(
            net(), mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)
        )


def _unnamed_units(rank: int, world: int) -> None:
    expected = single_process(OPTIMIZERS["AdamW"], world, 1, None)
    for classes, said in ((None, "4 units (3 Block, root) of at most "), (["Block"], ""), ([], "")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            found = sharded(rank, OPTIMIZERS["AdamW"], 1, None, fsdp_unit_modules=classes)
        _same(found, expected, classes)
        units = [unit.name for unit in found[2].engine.units]
        assert units == [*(f"blocks.{i}" for i in range(3)), "root"][3 * (classes == []) :]
        lines = printed.getvalue().splitlines()
        assert [said in line for line in lines] == [True] * (rank == 0 and bool(said)), lines
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        fully_shard_model(Block())
    assert ("1 unit, whose weights, 0.000 GiB, are gathered" in printed.getvalue()) == (rank == 0)


def _all(rank: int, world: int) -> None:
    _every_optimizer(rank, world)
    _habits(rank, world)
    _unnamed_units(rank, world)


def test_optimizers_and_habits_of_plain_training_loops() -> None:
    """Elementwise optimizers of torch; accumulation, explicit synchronization, state dicts, errors,
    and units of classes that are not given or given as strings."""
    run_ranks(_all, 2)


def test_attributes_that_a_user_has_put_on_parameters_stay_on_them(one_rank: None) -> None:
    """Parameter groups are made by them."""
    module = net()
    module.head.weight._no_weight_decay, module.temperature.lr_scale = True, 0.5
    model = fully_shard_model(module, None, [Block])
    params = dict(model.named_parameters())
    assert params["module.head.weight"]._no_weight_decay is True
    assert params["module.temperature"].lr_scale == 0.5
    assert not hasattr(params["module.embedding.weight"], "_no_weight_decay")


def _not_finite(rank: int, world: int) -> None:
    for strategy in STRATEGIES:
        model = fully_shard_model(net(), None, [Block], data_parallel_sharding_strategy=strategy)
        for bad in (torch.nan, torch.inf):
            for where in range(world):
                for norm_type in (torch.inf, 1.0, 2.0):
                    model(tokens(0, 0, rank)).backward()
                    if rank == where or strategy == "no_shard":
                        grads = [p.grad._local_tensor for p in model.parameters()]
                        next(grad for grad in grads if grad.numel()).view(-1)[0] = bad
                    norm = model.clip_grad_norm_(1.0, norm_type)
                    same = norm.isnan() if bad is torch.nan else norm.isinf()
                    assert same and norm.shape == (), (strategy, bad, where, norm_type, norm)
                    model.zero_grad()


def test_a_gradient_that_is_not_finite_on_one_rank_is_in_the_norm_of_all() -> None:
    """As with torch. A maximum over ranks drops NaN."""
    run_ranks(_not_finite, 2)


def _compiled(layers: nn.Sequential, as_function: bool, again: bool = False, **how: Any) -> None:
    """Compiles each layer, in place or by one that stands in for it. again: layers that are
    computed again in backward."""
    for number, layer in enumerate(layers):
        if again:
            layers[number] = layer = checkpoint_wrapper(layer)
        if as_function:
            layers[number] = torch.compile(layer, backend="aot_eager", **how)  # type: ignore[assignment]
        else:
            layer.compile(backend="aot_eager", **how)


COMPILED: dict[str, tuple[bool, bool, dict[str, Any], dict[str, Any]]] = {
    "as torchtitan does": (True, False, {"fullgraph": True}, {}),
    "ZeRO-2": (True, False, {}, {"data_parallel_sharding_strategy": "optim_grads"}),
    "by a function": (True, True, {"fullgraph": True}, {}),
    "by a function, units inside": (True, True, {}, {"fsdp_unit_modules": [Block, nn.Embedding]}),
    "with recomputation": (True, False, {"again": True}, {}),
    "layers of one unit": (True, False, {}, {"fsdp_unit_modules": []}),
    "after wrapping": (False, False, {}, {}),
    "by a function after wrapping": (False, True, {}, {}),
    "the whole model": (True, True, {}, {}),
}
"""Whether before wrapping, whether by torch.compile(layer), its options and those of wrapping."""


def _trains_compiled(name: str | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights after steps of two microbatches and an evaluation."""
    before, as_function, how, options = COMPILED[name] if name else (False, False, {}, {})
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = net()
    if name and "whole" in name:
        module = torch.compile(module, backend="aot_eager")  # type: ignore[assignment]
    elif name and before:
        _compiled(module.blocks, as_function, **how)
    model = fully_shard_model(module, **options)
    if name and not before:
        _compiled(module.blocks, as_function, **how)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=LR))
    losses = []
    for step in range(3):
        with model.no_sync():
            model(tokens(step, 0, dist.get_rank())).backward()
        loss = model(tokens(step, 1, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), model(tokens(step, 2, dist.get_rank())).item()]
    if name:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "layers were compiled"
    return losses, list(full_weights(model).values())


def _compiled_layers(rank: int, world: int) -> None:
    expected = _trains_compiled(None)
    for name in COMPILED:
        losses, weights = _trains_compiled(name)
        assert losses == expected[0], name
        assert all(map(torch.equal, weights, expected[1])), name


def test_layers_that_are_compiled_train_to_the_same_bits() -> None:
    """Before or after wrapping, as a method or a function. What is gathered and reduced is outside
    of the graphs. aot_eager computes with the operations of an eager run."""
    run_ranks(_compiled_layers, 2, timeout=300)


def test_no_megatron_is_imported() -> None:
    program = (
        "import sys; from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'megatron'])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
