"""A GPT of one layer, which most tests of the adapter wrap. Needs the fixture `one_rank`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter import FullyShardedDataParallel
from tests.lib.gpt.gpt import Case, batches, build_model, ddp_config

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2)
DEVICE = torch.device("cpu")


def data(number: int = 0) -> list[torch.Tensor]:
    """Tokens of each microbatch."""
    return batches(CASE, number, 0, DEVICE)


def wrapped(
    strategy: str = "optim_grads_params",
    case: Case = CASE,
    change: Callable[[Any], Any] = lambda model: None,
    ddp: Mapping[str, Any] = MappingProxyType({}),
    units: list[type[nn.Module]] | None = None,
    **options: Any,
) -> FullyShardedDataParallel:
    """The model, wrapped without an optimizer. `change` edits it before, `ddp` the DDP config."""
    model = build_model(case, DEVICE)
    change(model)
    config = ddp_config(case, strategy, ddp)
    return FullyShardedDataParallel(model.config, config, model, units, **options)
