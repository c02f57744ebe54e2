from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.distributed.gpt import STRATEGIES, Trainer, build_trainer
from tests.engine.pretended import pretended_world
from tests.on_the_cpu import cpu_mode_inside
from tests.one_rank import as_one_of_many


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """A gloo world of this process alone with Megatron's parallel state; gives the device."""
    folder: Path = tmp_path_factory.mktemp("world")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    with cpu_mode_inside(), as_one_of_many():
        parallel_state.initialize_model_parallel()
        yield torch.device("cpu")
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(params=STRATEGIES)
def trainer(request: pytest.FixtureRequest, one_rank: torch.device) -> Trainer:
    """The module's `CASE` under every strategy."""
    return build_trainer(request.module.CASE, request.param, one_rank)


@pytest.fixture
def four_fake_ranks() -> Iterator[None]:
    """Rank 0 of four ranks of which the others do not exist: whatever waits for them is wrong."""
    with pretended_world(4), cpu_mode_inside():
        yield
