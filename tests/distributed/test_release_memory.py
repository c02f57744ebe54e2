"""A wrapped model whose memory was given back and taken again trains on bit for bit, and is an
error to use meanwhile. Buffers are poisoned where the suite runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import (
    export_shards,
    export_weights,
    fully_shard_optimizer,
    release_memory,
    return_memory,
)
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.memory import KINDS
from megatron_fsdp_adapter.core.runtime.device import storage_bytes
from tests.distributed.launch import run_ranks
from tests.distributed.plain import tokens
from tests.distributed.test_export_plain import assert_same, sharded, train

pytestmark = pytest.mark.once


def buffers(model: Any) -> list[torch.Tensor]:
    """Every flat tensor of the engine's, found without the code that releases them."""
    found = {}
    for unit in model.engine.units:
        for group in unit.groups:
            mine = [*group.weights, *(plane.shard for plane in group.planes), group.main]
            if group.key.requires_grad:
                mine += [group.grad, group.bucket, group.collected]
            found.update({id(buffer): buffer.tensor for buffer in mine})
    return list(found.values())


def states(optimizer: Any) -> list[torch.Tensor]:
    shards = optimizer._fsdp_shards.state.values()
    return [v for state in shards for v in state.values() if isinstance(v, torch.Tensor)]


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = model.full_state_dict()
    for number, state in enumerate(states(optimizer)):
        found[f"state {number}"] = getattr(state, "_local_tensor", state).clone()
    return found


def _cycle(model: Any, optimizer: Any) -> None:
    """Everything away and back, in the steps that users take, with nothing left on the device."""
    held, moments = (sum(map(storage_bytes, of)) for of in (buffers(model), states(optimizer)))
    first = release_memory(model, optimizer, keep="main_weights")
    assert first["optimizer"] == moments
    dict(export_weights(model))
    list(export_shards(model))
    second = release_memory(model, optimizer)
    assert not any(map(storage_bytes, buffers(model)))
    assert not any(map(storage_bytes, states(optimizer)))
    # Gradients, and what was gathered ahead, are forgotten before anything is counted.
    assert 0 < sum(first.values()) + second["main_weights"] - moments <= held
    assert not any(release_memory(model, optimizer).values()), "it is away"
    return_memory(model, only="main_weights")
    dict(export_weights(model))
    return_memory(model, optimizer)
    return_memory(model, optimizer)


def _trains_on(rank: int, world: int, strategy: str) -> None:
    for mesh, computes in (
        (None, torch.float32), (None, torch.bfloat16), ("no_shard", torch.bfloat16),
        ("optim", torch.bfloat16),
    ):  # fmt: skip
        options: dict[str, Any] = {}
        if mesh is not None:
            if world == 1 or (mesh == "optim" and strategy == "no_shard"):
                continue
            sizes = (2, world // 2)
            made = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner"))
            options = {"mesh": made, "outer_dp_sharding_strategy": mesh}
        plain, without = sharded(strategy, computes, **options)
        model, optimizer = sharded(strategy, computes, **options)
        for step in range(4):
            for one, stepper in ((plain, without), (model, optimizer)):
                train(one, stepper, step)
                if step == 1:
                    with torch.no_grad():
                        one(tokens(step, 1, rank))  # gathered ahead, and not used
            if step < 3:
                _cycle(model, optimizer)
        assert_same(state_of(model, optimizer), state_of(plain, without), f"{mesh} {computes}")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_training_goes_on_bit_for_bit(strategy: str, world: int) -> None:
    run_ranks(_trains_on, world, strategy, timeout=400)


USES: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda model, _: model(tokens(0, 0, 0)),
    "evaluation": lambda model, _: torch.no_grad()(model)(tokens(0, 0, 0)),
    "a module below": lambda model, _: model.module.blocks[0](torch.ones(2, 10)),
    "state dict": lambda model, _: model.state_dict(),
    "state dict of a module below": lambda model, _: model.module.blocks.state_dict(),
    "full state dict": lambda model, _: model.full_state_dict(),
    "load": lambda model, _: model.load_state_dict({}, strict=False),
    "export": lambda model, _: list(export_weights(model)),
    "export of shards": lambda model, _: list(export_shards(model)),
    "step": lambda _, optimizer: optimizer.step(),
    "state dict of the optimizer": lambda _, optimizer: optimizer.state_dict(),
    "load into the optimizer": lambda _, optimizer: optimizer.load_state_dict(
        {"state": {}, "param_groups": []}
    ),
    "values": lambda model, _: next(iter(model.parameters())) + 1,
    "finish": lambda model, _: model.finish_grad_sync(),
    "clip": lambda model, _: model.clip_grad_norm_(1.0),
}


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_using_what_was_released_is_an_error_that_names_the_remedy(
    one_rank: None, strategy: str
) -> None:
    model, optimizer = sharded(strategy)
    train(model, optimizer, 0)
    before = copy.deepcopy(state_of(model, optimizer))
    release_memory(model, optimizer)
    for name, use in USES.items():
        if name == "clip" and strategy == "optim_grads_params":
            continue  # without gradients there is nothing to clip
        with pytest.raises(RuntimeError, match="return_memory"):
            use(model, optimizer)
            pytest.fail(name)
    assert [tuple(p.shape) for _, p in model.named_parameters()], "names and shapes are there"
    model.zero_grad()
    optimizer.zero_grad()
    model.describe()
    return_memory(model, optimizer)
    assert_same(state_of(model, optimizer), before, "nothing was written")
    train(model, optimizer, 1)


def test_what_is_kept_stays_usable(one_rank: None) -> None:
    model, optimizer = sharded("optim_grads_params")
    train(model, optimizer, 0)
    before = state_of(model, optimizer)
    release_memory(model, optimizer, keep=KINDS)
    model(tokens(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match="its state was released"):
        optimizer.step()
    model.zero_grad()
    return_memory(model, optimizer)
    assert_same(state_of(model, optimizer), before, "moments")
    released = release_memory(model, keep=["main_weights"])
    assert "optimizer" not in released or not released["optimizer"]
    model.state_dict()
    optimizer.state_dict()
    with pytest.raises(RuntimeError, match="using the model"):
        model(tokens(0, 0, 0))
    return_memory(model)


def test_host_memory_is_taken_once_and_optimizer_state_that_was_replaced_goes(
    one_rank: None,
) -> None:
    model, optimizer = sharded("optim")
    train(model, optimizer, 0)
    release_memory(model, optimizer)
    return_memory(model, optimizer)
    lots = (model.engine.memory._lot, optimizer._fsdp_shards.parked)
    def places() -> list[Any]:
        return [
            [c.data_ptr() for h in one._host for c in h]
            for lot in lots for known in lot._known.values() for one in known.values()
        ]
    first = places()
    release_memory(model, optimizer)
    return_memory(model, optimizer)
    assert places() == first


@pytest.mark.parametrize(
    ("options", "named"),
    [({"keep": "weights"}, "keep='weights'"), ({"keep": ["slots", "x"]}, "keep='x'")],
)  # fmt: skip
def test_a_wrong_kind_is_named(one_rank: None, options: Any, named: str) -> None:
    model, optimizer = sharded("optim")
    with pytest.raises(ValueError, match=named):
        release_memory(model, optimizer, **options)
    with pytest.raises(ValueError, match="only='weights'"):
        return_memory(model, optimizer, only="weights")


def test_an_optimizer_that_is_not_sharded_is_named(one_rank: None) -> None:
    model, _ = sharded("optim")
    with pytest.raises(ValueError, match="SGD is not over a wrapped model"):
        release_memory(model, torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0))


def test_memory_whose_addresses_a_graph_has_stays(one_rank: None) -> None:
    model, optimizer = sharded("optim")
    train(model, optimizer, 0)
    model.engine.memory.pinned_by = "a CUDA graph"
    with pytest.raises(RuntimeError, match="a CUDA graph has addresses of main_weights"):
        release_memory(model, optimizer)
    assert all(map(storage_bytes, states(optimizer))), "nothing was released"
    assert release_memory(model, optimizer, keep=KINDS)["optimizer"] > 0
    return_memory(model, optimizer)
    train(model, optimizer, 1)


def test_an_optimizer_without_state_has_nothing_to_release(one_rank: None) -> None:
    model, _ = sharded("optim_grads_params")
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert release_memory(model, optimizer)["optimizer"] == 0
    return_memory(model, optimizer)
    train(model, optimizer, 0)
