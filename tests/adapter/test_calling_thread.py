"""`fsdp_backward_on_calling_thread`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.gpt import Case, batches, build_trainer, train_step

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23)
OPTION = "fsdp_backward_on_calling_thread"

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    with torch.autograd.set_multithreading_enabled(True):
        yield


def test_backward_runs_on_the_thread_that_calls_it_where_that_is_asked_for(
    one_rank: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU it always does; a GPU's thread is not used where autograd has this switched off."""
    for asked in (False, True):
        trainer = build_trainer(CASE, "optim_grads_params", one_rank, ddp={OPTION: asked})
        assert ("backward on the thread that calls it" in capsys.readouterr().out) is asked
        data = batches(CASE, 0, 0, one_rank)
        train_step(trainer, data)
        assert torch._C._is_multithreading_enabled() is not asked
