"""A host that stands for a device with memory to spare, for budgets found while training."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_fsdp_adapter.build import auto_budget


@contextmanager
def spare(nbytes: int, failing: range = range(0), on: Collection[int] = (1,)) -> Iterator[None]:
    """Inside, the host counts as a device with memory to spare, of which the second rank has a
    little less; `on` some ranks allocations fail ahead of the counts with numbers in `failing`."""
    counted = itertools.count()
    rank = torch.distributed.get_rank()

    def failures(device: torch.device) -> int:
        if rank in on:
            return sum(at in failing for at in range(next(counted) + 1))
        return 0

    with (
        mock.patch.object(auto_budget, "spare_memory", lambda device: nbytes - 8 * rank),
        mock.patch.object(auto_budget, "failed_allocations", failures),
    ):
        yield


def agree_on(models: Sequence[Any], nbytes: int) -> None:
    """Has engines that find a budget keep units for `nbytes` from the first step on, until the
    ranks agree on what they have measured."""
    for model in models:
        model.engine.budget.agreed = nbytes
        model.engine.budget.most = nbytes
