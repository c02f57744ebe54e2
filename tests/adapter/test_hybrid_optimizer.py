"""Core's optimizer offload: what is shown of its state, and what it refuses.

Training beside stock DDP: tests/distributed/test_hybrid_device.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from megatron.core.optimizer import get_megatron_optimizer
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter import FullyShardedDataParallel
from tests.distributed.fused_adam import transformer_engine_optimizer
from tests.distributed.gpt import (
    Case,
    batches,
    build_model,
    build_trainer,
    ddp_config,
    distributed_optimizer,
    optimizer_config,
    train_step,
)
from tests.distributed.hybrid_device import offload, two_memories

CASE = Case(
    num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.5, adam_eps=1e-3
)


@pytest.fixture
def stand_ins() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("fused", [False, True])
def test_its_state_is_shown_as_that_of_the_optimizer_without_offload(
    one_rank: torch.device, fused: bool, stand_ins: ExitStack
) -> None:
    """Keys, shapes and where the step is: per parameter, or in the group as of fused ones."""
    if fused:
        stand_ins.enter_context(transformer_engine_optimizer())
    plain = build_trainer(CASE, "optim_grads", one_rank)
    stand_ins.enter_context(two_memories())
    ours = build_trainer(CASE, "optim_grads", one_rank, optimizer=offload(0.5))
    for _ in range(2):
        shown = []
        for trainer in (plain, ours):
            inner = distributed_optimizer(trainer)
            trainer.wrapper.stop_communication()
            shown.append(inner.sharded_param_state_fsdp_dtensor())
        assert shown[0]["state"].keys() == shown[1]["state"].keys()
        for name, entry in shown[0]["state"].items():
            mine = shown[1]["state"][name]
            assert mine.keys() == entry.keys(), name
            for key, value in entry.items():
                assert type(mine[key]) is type(value)
                if isinstance(value, DTensor):
                    assert mine[key].shape == value.shape and mine[key].dtype == value.dtype
                else:
                    assert mine[key] == value, (name, key)
        for name, meta in shown[0]["param_to_group_meta"].items():
            mine = shown[1]["param_to_group_meta"][name]
            assert mine.keys() == meta.keys(), name
            assert mine.get("step") == meta.get("step")
        for trainer in (plain, ours):
            train_step(trainer, batches(CASE, 0, 0, one_rank))


@pytest.mark.parametrize(
    ("ddp", "options", "says"),
    [
        ({}, offload(), ("optimizer_cpu_offload=True", "on the CPU already")),
        ({}, offload(1.5), ("optimizer_offload_fraction=1.5", "0.0 to 1.0")),
        ({}, {**offload(), "decoupled_weight_decay": False}, ("decoupled_weight_decay=False",)),
        ({}, {**offload(), "exp_avg_dtype": torch.bfloat16}, ("exp_avg_dtype=torch.bfloat16",)),
        ({"megatron_fsdp_main_params_dtype": torch.bfloat16}, offload(),
         ("main weights are in ['torch.bfloat16']", "megatron_fsdp_main_params_dtype")),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_an_early_error(
    one_rank: torch.device, ddp: dict[str, Any], options: dict[str, Any], says: tuple[str, ...]
) -> None:
    model = build_model(CASE.but(bf16=True), one_rank)
    wrapper = FullyShardedDataParallel(
        model.config, ddp_config(CASE, "optim_grads_params", ddp), model
    )
    config = optimizer_config(CASE)
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(ValueError) as caught:
        get_megatron_optimizer(config, [wrapper], use_gloo_process_groups=False)
    assert all(text in str(caught.value) for text in says), caught.value
