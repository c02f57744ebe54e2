"""`chunked_optimizer_state_offload` of plain modules: the bits of training without it, in loops
that do what plain loops do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.distributed.gpt import full_all
from tests.distributed.launch import run_ranks
from tests.distributed.plain import Block, net, tokens

BF16 = torch.bfloat16
Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "amsgrad, two groups": lambda params: torch.optim.Adam(_two(params), lr=1e-2, amsgrad=True),
}


def _two(params: Any) -> list[dict[str, Any]]:
    every = list(params)
    return [{"params": every[::2], "lr": 2e-2}, {"params": every[1::2]}]


def _wrapped(strategy: str, offload: bool, make: Make) -> tuple[Any, torch.optim.Optimizer]:
    model = fully_shard_model(
        net(BF16), fsdp_unit_modules=[Block], data_parallel_sharding_strategy=strategy,
        chunked_optimizer_state_offload=offload,
    )
    return model, make(model.parameters())


def _loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[Any]:
    """A scheduler from before the optimizer is sharded, clipping, a closure, writes to parameters
    between steps; what came of it."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    fully_shard_optimizer(optimizer)
    losses = []
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(tokens(step, 0, rank))
            loss.backward()
            losses.append(loss.item())
            return loss

        if step == 2:
            optimizer.step(closure)
        else:
            closure()
            losses.append(float(model.clip_grad_norm_(0.5)))
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            if step == 1:
                for param in model.parameters():
                    param.mul_(0.9)
            losses.append(model(tokens(9, 0, rank)).item())
    assert optimizer.param_groups[-1]["lr"] == pytest.approx(1e-2 * 0.5**4)
    state = {
        f"{number}.{name}": value
        for number, param in enumerate(model.parameters())
        for name, value in optimizer.state[param].items()
    }
    moments = {name: value for name, value in state.items() if value.dim() > 0}
    steps = {name: value for name, value in state.items() if value.dim() == 0}
    weights = {name: param.detach() for name, param in model.named_parameters()}
    return [losses, steps, full_all({**weights, **moments})]


def _same(rank: int, world: int) -> None:
    for strategy in STRATEGIES:
        for name, make in MAKERS.items():
            plain, ours = (_loop(*_wrapped(strategy, on, make), rank) for on in (False, True))
            assert ours[0] == plain[0], (strategy, name)
            for found, expected in zip(ours[1:], plain[1:], strict=True):
                assert found.keys() == expected.keys()
                for key in expected:
                    assert torch.equal(found[key], expected[key]), (strategy, name, key)


def test_plain_loops_have_the_bits_of_those_without_offload() -> None:
    run_ranks(_same, 2)


class Broken(torch.optim.AdamW):
    """Raises in the middle of a step, once asked to."""

    after = -1

    def step(self, closure: Any = None) -> Any:
        self.after -= 1
        if self.after == 0:
            raise RuntimeError("broken")
        return super().step(closure)


def _broken(rank: int, world: int) -> None:
    """A step that raised leaves nothing on the device, and the next one is whole."""
    make = lambda params: Broken(params, lr=1e-2)  # noqa: E731
    runs = []
    for breaks in (False, True):
        model, optimizer = _wrapped("optim_grads_params", True, make)
        fully_shard_optimizer(optimizer)
        shards: Any = optimizer._fsdp_shards  # type: ignore[attr-defined]
        if breaks:
            model(tokens(0, 0, rank)).backward()
            before = {n: p._local_tensor.clone() for n, p in model.named_parameters()}
            optimizer.after = 2  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="broken"):
                optimizer.step()
            twins = [b.device_buffer for stage in shards._stages for b in stage.buffers]
            assert not any(device_buffer.allocated for device_buffer in twins)
            assert all(len(group["params"]) > 0 for group in optimizer.param_groups)
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param._local_tensor.copy_(before[name])
                for state in optimizer.state.values():
                    for value in state.values():
                        getattr(value, "_local_tensor", value).zero_()
            optimizer.zero_grad()
        for step in range(2):
            model(tokens(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append({n: p._local_tensor.clone() for n, p in model.named_parameters()})
    for name, expected in runs[0].items():
        assert torch.equal(runs[1][name], expected), name


def test_a_step_that_raised_leaves_nothing_behind() -> None:
    run_ranks(_broken, 1)


def _refused(rank: int, world: int) -> None:
    for make, says in (
        (lambda params: torch.optim.SGD(params, lr=0.1), "optimizer=SGD"),
        (lambda params: torch.optim.NAdam(params, lr=0.1), "optimizer=NAdam"),
    ):
        _, optimizer = _wrapped("optim", True, make)
        with pytest.raises(ValueError, match=f"chunked_optimizer_state_offload=True with {says}"):
            fully_shard_optimizer(optimizer)
    model, optimizer = _wrapped("optim", True, lambda params: _of_weights(params))
    fully_shard_optimizer(optimizer)
    optimizer.add_param_group({"params": [p for p in model.parameters() if p.dim() == 1]})
    model(tokens(0, 0, rank)).backward()
    with pytest.raises(ValueError, match="add_param_group with chunked_optimizer_state_offload"):
        optimizer.step()
    other = fully_shard_model(net(BF16), fsdp_unit_modules=[Block])
    both = nn.ModuleList([model, other])
    with pytest.raises(ValueError, match="for some of the models"):
        fully_shard_optimizer(torch.optim.AdamW(both.parameters()))


def _of_weights(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.dim() != 1])


def test_what_it_cannot_do_is_an_error() -> None:
    run_ranks(_refused, 1)
