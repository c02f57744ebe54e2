"""`torch.optim.Muon` on plain modules, beside one process that shards nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.sharding.muon.newton_schulz import coefficients_of, orthogonalized
from tests.distributed.launch import run_ranks
from tests.distributed.plain import Block, net, tokens
from tests.distributed.test_fully_shard import full_weights

STEPS = 5
LR = 0.02
OPTIONS = {"lr": LR, "weight_decay": 0.1, "momentum": 0.9}


def is_muons(name: str, param: torch.Tensor) -> bool:
    return "blocks" in name and param.dim() == 2


def optimizers(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [param for name, param in named if is_muons(name, param)]
    rest = [param for name, param in named if not is_muons(name, param)]
    muon = torch.optim.Muon(matrices, **{**OPTIONS, **options})
    return [muon, torch.optim.AdamW(rest, lr=1e-3, eps=1e-3)]


def whole(world: int, **options: Any) -> dict[str, torch.Tensor]:
    """One process, on the data of all ranks, with torch's own Muon."""
    model = net()
    steps = optimizers(model, **options)
    for step in range(STEPS):
        for rank in range(world):
            (model(tokens(step, 0, rank)) / world).backward()
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def sharded(rank: int, strategy: str, **options: Any) -> dict[str, torch.Tensor]:
    model = fully_shard_model(
        net(), fsdp_unit_modules=[Block, nn.Embedding], data_parallel_sharding_strategy=strategy
    )
    steps = [fully_shard_optimizer(optimizer) for optimizer in optimizers(model, **options)]
    for step in range(STEPS):
        model(tokens(step, 0, rank)).backward()
        for optimizer in steps:
            optimizer.step()
        for optimizer in steps:
            optimizer.zero_grad()
    return full_weights(model)


def check_strategies(rank: int, world: int) -> None:
    expected = whole(world)
    found = {strategy: sharded(rank, strategy) for strategy in STRATEGIES}
    for strategy, weights in found.items():
        for name, value in expected.items():
            # An update has entries of 1 at most, times what its shape gives, and is off by bf16.
            error = (weights[name] - value).abs().max().item()
            assert error < STEPS * LR * 1.6 * 0.03, (strategy, name, error)
    first, *others = found.values()
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


FULL = [pytest.param(world, marks=pytest.mark.full) for world in (1, 3, 4)]


@pytest.mark.parametrize("world", [2, *FULL])
def test_the_weights_are_those_of_one_process(world: int) -> None:
    run_ranks(check_strategies, world)


# The same gradients on any number of ranks: the same bits.


def given_gradients(rank: int, world: int) -> None:
    """Steps with gradients that are set, not computed."""
    model = fully_shard_model(net(), fsdp_unit_modules=[Block])
    muon, _ = (fully_shard_optimizer(optimizer) for optimizer in optimizers(model))
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        model(tokens(0, 0, rank)).backward()
        for name, param in model.named_parameters():
            value = torch.randn(param.shape, generator=generator)
            if is_muons(name, param):
                rows = slice(*_rows(param))
                param.grad._local_tensor.copy_(value.view(-1)[rows].view_as(param._local_tensor))
        muon.step()
        muon.zero_grad()
    weights = full_weights(model)
    for name, value in expected_of_given().items():
        assert not is_muons(name, value) or torch.equal(weights[name], value), name


def _rows(param: Any) -> tuple[int, int]:
    ref = param.fsdp_layout_ref
    held = ref.layout.shard_range(ref.index, ref.rank)
    return held.start, held.stop


def expected_of_given() -> dict[str, torch.Tensor]:
    """Muon written down once more, whole matrices in float32 but for the products."""
    model, generator = net(), torch.Generator().manual_seed(7)
    momenta: dict[str, torch.Tensor] = {}
    for _ in range(3):
        for name, param in model.named_parameters():
            grad = torch.randn(param.shape, generator=generator)
            if not is_muons(name, param):
                continue
            momentum = momenta.setdefault(name, torch.zeros_like(grad)).lerp_(grad, 0.1)
            update = grad.lerp(momentum, 0.9).bfloat16()
            direction = orthogonalized(update[None], coefficients_of("simple", 5))[0].float()
            factor = max(1, grad.shape[0] / grad.shape[1]) ** 0.5
            param.data.mul_(1 - LR * 0.1)
            param.data.add_(direction, alpha=-LR * factor)
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world", [2, *FULL])
def test_the_same_gradients_give_the_same_bits_on_any_number_of_ranks(world: int) -> None:
    run_ranks(given_gradients, world)


# The first update, and state.


def first_update(rank: int, world: int) -> None:
    """Orthogonal: a run that steps with another optimizer than it says does not pass."""
    model = fully_shard_model(net(), fsdp_unit_modules=[Block])
    before = full_weights(model)
    muon = fully_shard_optimizer(optimizers(model, weight_decay=0.0)[0])
    model(tokens(0, 0, rank)).backward()
    muon.step()
    after = full_weights(model)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == [name for name in before if is_muons(name, before[name])]
    for name in changed:
        scale = LR * max(1, before[name].shape[0] / before[name].shape[1]) ** 0.5
        values = torch.linalg.svdvals((after[name] - before[name]) / scale)
        assert values.median() > 0.6 and values.max() < 1.4, (name, values)
    for param in muon.param_groups[0]["params"]:
        assert list(muon.state[param]) == ["momentum_buffer"]
        assert muon.state[param]["momentum_buffer"].shape == param.shape
    saved = muon.state_dict()
    again = fully_shard_optimizer(optimizers(model, weight_decay=0.0)[0])
    again.load_state_dict(saved)
    for param in muon.param_groups[0]["params"]:
        theirs, ours = muon.state[param]["momentum_buffer"], again.state[param]["momentum_buffer"]
        assert torch.equal(theirs._local_tensor, ours._local_tensor)


def test_the_first_update_is_orthogonal_and_momentum_is_saved_in_rows() -> None:
    run_ranks(first_update, 2)


def refusals(rank: int, world: int) -> None:
    model = fully_shard_model(net(), fsdp_unit_modules=[Block])

    class Mine(torch.optim.Muon):
        def step(self, closure: Any = None) -> None:
            raise AssertionError

    [group] = optimizers(model)[0].param_groups
    with pytest.raises(ValueError, match=r"optimizer=Mine: its step needs whole tensors"):
        fully_shard_optimizer(Mine(group["params"]))
    first, *others = group["params"]
    muon = torch.optim.Muon([{"params": [first], "ns_steps": 3}, {"params": others}])
    fully_shard_optimizer(muon)
    model(tokens(0, 0, rank)).backward()
    with pytest.raises(ValueError, match="give all parameter groups the same"):
        muon.step()
    assert len(muon.param_groups[1]["params"]) == len(others)


def test_what_cannot_be_stepped_is_refused() -> None:
    run_ranks(refusals, 1)
