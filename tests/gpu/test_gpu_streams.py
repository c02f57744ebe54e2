"""Weights that another stream is still making when a model is wrapped."""

from __future__ import annotations

import torch
from torch import nn

from megatron_fsdp_adapter import fully_shard_model
from tests.gpu.gpu_ranks import Check, Outcomes

GPUS = 1
CYCLES = 10**9
"""What the other stream is busy with: about half a second."""


def waits(rank: int, world: int) -> None:
    model = nn.Linear(512, 512, device=torch.device("cuda", rank))
    expected = {name: value + 1 for name, value in model.state_dict().items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():  # type: ignore[no-untyped-call]
        torch.cuda._sleep(CYCLES)
        for param in model.parameters():
            param.add_(1)
    found = fully_shard_model(model).full_state_dict(cpu_offload=True)
    for name, value in expected.items():
        assert torch.equal(found[name], value.cpu()), name


OUTCOMES = Outcomes({"waits": Check(waits)}, timeout_s=120.0, world=1)


def test_weights_of_another_stream_are_waited_for() -> None:
    OUTCOMES.expect("waits")
