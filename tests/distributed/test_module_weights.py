"""Weights of a sharded model read and written one at a time, as its modules would have them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.sharding.module_weights import ModuleWeight, module_weights
from tests.distributed.gpt import Case, build_trainer, init_megatron
from tests.distributed.launch import run_ranks

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, swiglu=True)
OUTER = (None, "no_shard", "optim")


def tensors_of(inner: Any) -> dict[str, torch.Tensor]:
    """Without what Transformer Engine's modules would pickle."""
    return {k: v for k, v in inner.full_state_dict().items() if isinstance(v, torch.Tensor)}


def check_weights(strategy: str, outer: str | None, device: torch.device) -> None:
    ddp: dict[str, Any] = {}
    if outer is not None:
        ddp = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer}
    trainer = build_trainer(CASE, strategy, device, ddp=ddp)
    engine, inner = trainer.wrapper.engine, trainer.wrapper.module
    before = tensors_of(inner)
    torch.manual_seed(4)  # the same values on all ranks
    values = {name: torch.randn(value.shape) for name, value in before.items()}
    for pair in engine.pairs:
        weight, name = ModuleWeight(pair, engine), pair.managed.fqns[0]
        assert weight.shape == pair.unsharded.shape and weight.dtype == pair.unsharded.dtype
        assert torch.equal(weight.gather(), before[name])
        weight.data.copy_(values[name].double())
        assert torch.equal(weight.gather(), values[name])
        assert torch.equal(weight.gather(torch.bfloat16), values[name].bfloat16())
    engine.main_weights_changed(loaded=True)
    after = tensors_of(inner)
    assert after.keys() == values.keys()
    assert all(torch.equal(after[name], value) for name, value in values.items())
    found = module_weights([engine])
    for pair in engine.pairs:
        assert found[id(pair.unsharded)] is found[id(pair.sharded)]


def check_all(rank: int, world: int, given: tuple[str | None, ...]) -> None:
    for outer in given:
        instances = {} if outer is None else {"num_distributed_optimizer_instances": 2}
        device = init_megatron(**instances)
        for strategy in STRATEGIES:
            check_weights(strategy, outer, device)


def test_whole_values_go_in_and_out_bit_for_bit() -> None:
    """Two ranks, all strategies; another dtype is a cast."""
    run_ranks(check_all, 2, OUTER[:1])


def test_with_an_outer_axis_that_splits_shards_or_does_not() -> None:
    run_ranks(check_all, 4, OUTER[1:])
