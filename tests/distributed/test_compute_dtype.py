"""Units that compute in another dtype than their parameters have (`compute_dtype`): the numbers are
those of torch's FSDP2 with the same dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard

from megatron_fsdp_adapter import (
    MixedPrecisionPolicy,
    export_weights,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.distributed.checks import check_same_bits
from tests.distributed.plain import Block, net, tokens
from tests.distributed.shared_ranks import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 3

POLICY = MixedPrecisionPolicy(main_params_dtype=None, compute_dtype=BF16)
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"data_parallel_sharding_strategy": name} for name in STRATEGIES},
    "in host memory": {"chunked_optimizer_state_offload": True},
}


def _module() -> nn.Module:
    """In float32, with a weight that is not trained and is not what bf16 can hold."""
    module = net()
    module.blocks[0].norm.weight.requires_grad_(False).add_(1e-4)
    module.temperature = nn.Parameter(torch.tensor([1.5]))  # torch's takes no scalars
    return module


@on_ranks(2)
def test_fp32_parameters_computed_with_in_bf16_train_like_fsdp2(rank: int, world: int) -> None:
    theirs, policy = _module(), TorchPolicy(param_dtype=BF16, reduce_dtype=FP32)
    mesh = init_device_mesh("cpu", (world,))
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    expected = _losses(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), rank)
    weights = {name: param.full_tensor() for name, param in theirs.named_parameters()}
    for name, options in OPTIONS.items():
        ours = fully_shard_model(
            _module(), None, [Block], mixed_precision_policy=POLICY, **options
        )
        check_same_bits(ours.full_state_dict(), _module().state_dict(), f"{name}, before")
        optimizer = fully_shard_optimizer(torch.optim.AdamW(ours.parameters(), lr=1e-2))
        assert _losses(ours, optimizer, rank) == expected, name
        check_same_bits(ours.full_state_dict(), weights, name)
        assert {p.dtype for p in ours.parameters()} == {FP32}
        check_same_bits(dict(export_weights(ours, dtype=FP32)), weights, f"{name}, exported")


def _losses(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    found = []
    for step in range(STEPS):
        loss = model(tokens(step, 0, rank)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
