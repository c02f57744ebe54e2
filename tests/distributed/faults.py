"""Mistakes to put into the engine, to show that the suite sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from megatron_fsdp_adapter.core.engine.group import ParamGroup
from megatron_fsdp_adapter.megatron import domains


@contextmanager
def scaled_gradients(factor: float) -> Iterator[None]:
    """Wrappers built inside scale their gradients by `factor` too much."""
    original = domains.grad_scale
    with mock.patch.object(domains, "grad_scale", lambda *args: original(*args) * factor):
        yield


@contextmanager
def dropped_microbatch(microbatches: int) -> Iterator[None]:
    """Inside, the last rank loses the gradients of the second microbatch of every step."""
    original = ParamGroup.take_grads
    calls: Counter[ParamGroup] = Counter()

    def take_grads(group: ParamGroup, accumulate: bool) -> None:
        calls[group] += 1
        if calls[group] % microbatches == 2 % microbatches and _is_last_rank():
            for param in group.params:
                param.grad = None
        original(group, accumulate)

    with mock.patch.object(ParamGroup, "take_grads", take_grads):
        yield


def _is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1
