"""Options of activation offload: what is accepted, and what is one early error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.extensions import transformer_engine as extension
from megatron.core.pipeline_parallel import fine_grained_activation_offload

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.megatron.options import validation
from tests.distributed.gpt import Case, build_model, ddp_config

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23)


def _wrap(device: torch.device, **options: Any) -> FullyShardedDataParallel:
    model = build_model(CASE, device)
    for name, value in options.items():
        setattr(model.config, name, value)
    return FullyShardedDataParallel(model.config, ddp_config(CASE, "optim_grads_params"), model)


def test_offload_inside_of_layers_needs_transformer_engine(one_rank: torch.device) -> None:
    with (
        mock.patch.object(extension, "cpu_offload", None),
        pytest.raises(ValueError, match="fine_grained_activation_offloading=True: core offloads"),
    ):
        _wrap(one_rank, fine_grained_activation_offloading=True, offload_modules=["attn_norm"])
    with mock.patch.object(extension, "cpu_offload", SimpleNamespace()):
        _wrap(one_rank, fine_grained_activation_offloading=True, offload_modules=["attn_norm"])


def test_offload_of_layers_is_accepted_where_core_has_it(one_rank: torch.device) -> None:
    for weights in (False, True):
        wrapped = _wrap(
            one_rank, cpu_offloading=True, cpu_offloading_num_layers=1,
            cpu_offloading_weights=weights, cpu_offloading_double_buffering=True,
        )  # fmt: skip
        assert wrapped.config.cpu_offloading


@pytest.mark.parametrize(
    "beside", [{"pipeline_model_parallel_size": 2}, {"recompute_granularity": "selective"}]
)
def test_arguments_that_core_refuses_are_one_line(beside: dict[str, Any]) -> None:
    config = SimpleNamespace(cpu_offloading=True, cpu_offloading_num_layers=1, **beside)
    found = validation.problems(config, validation.MODEL_CONFIG_RULES)
    assert len(found) == 1 and found[0].startswith("cpu_offloading=True: core offloads"), found


def test_core_asks_us_of_each_tensor(one_rank: torch.device) -> None:
    """Of a view of a gathered weight as well, whatever its size."""
    wrapped = _wrap(one_rank)
    wrapped.engine.sync_weights(wait=True)
    weight = wrapped.module.module.output_layer.weight
    handler = fine_grained_activation_offload.ChunkOffloadHandler
    asked = SimpleNamespace(
        min_offloaded_tensor_size=1, _can_manage_tensor_for_offload=lambda tensor: True
    )
    for tensor, goes in ((weight.detach().t(), False), (weight.view(-1), False),
                         (torch.ones(3), True)):  # fmt: skip
        assert handler.tensor_need_offloading_checker(asked, tensor) is goes
