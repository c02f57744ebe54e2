from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron.core import parallel_state

from megatron_fsdp_adapter import uninstall
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import OPTIMIZER
from tests.lib.engine.pretended import pretended_world
from tests.lib.gpt.gpt import STRATEGIES, Trainer, build_trainer
from tests.lib.ranks.on_the_cpu import cpu_mode_inside
from tests.lib.ranks.one_rank import as_one_of_many, world_of_one


@pytest.fixture(scope="module")
def one_rank() -> Iterator[torch.device]:
    """A gloo world of this process alone with Megatron's parallel state; gives the device."""
    with world_of_one(), cpu_mode_inside(), as_one_of_many():
        parallel_state.initialize_model_parallel()
        yield torch.device("cpu")
        parallel_state.destroy_model_parallel()


@pytest.fixture(params=STRATEGIES)
def trainer(request: pytest.FixtureRequest, one_rank: torch.device) -> Trainer:
    """The module's `CASE` under every strategy."""
    return build_trainer(request.module.CASE, request.param, one_rank)


@pytest.fixture
def four_fake_ranks() -> Iterator[None]:
    """Rank 0 of four ranks of which the others do not exist: whatever waits for them is wrong."""
    with pretended_world(4), cpu_mode_inside():
        yield


@pytest.fixture
def not_installed() -> Iterator[None]:
    """Core without our methods, and nothing of what is installed in the test behind it."""
    uninstall()
    patches.uninstall(OPTIMIZER)
    yield
    uninstall()
