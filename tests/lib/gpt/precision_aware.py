"""A trainer with Megatron's precision-aware optimizer."""

from __future__ import annotations

from typing import Any

import torch

from tests.lib.gpt.fused_adam import precision_aware, transformer_engine_optimizer
from tests.lib.gpt.gpt import Case, build_trainer

CASE = Case(
    num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, bf16=True, clip=0.05
)


def precision_aware_trainer(
    strategy: str, policy: dict[str, Any], device: torch.device, **options: Any
) -> Any:
    with transformer_engine_optimizer():
        return build_trainer(
            CASE,
            strategy,
            device,
            ddp=policy,
            optimizer=lambda config: precision_aware(config, **options),
        )
