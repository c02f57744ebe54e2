"""Trainers whose first units are gathered beside the step of the optimizer, as in whole iterations
in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megatron_fsdp_adapter.megatron import late_step

EARLY = {late_step.OPTION: True}
"""Of the DDP config."""


@contextmanager
def of_whole_iterations() -> Iterator[None]:
    """Inside, an optimizer takes its model for one whose options ask for graphs of iterations,
    which they cannot without a GPU; tests capture by themselves."""
    with mock.patch.object(late_step, "captures_iteration", lambda config: True):
        yield
