from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.distributed.gpt import init_megatron
from tests.one_rank import as_one_of_many

# Spawned ranks import the helper modules of these folders by name.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]


@pytest.fixture
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo world of this process alone, without a launcher."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with as_one_of_many():
        yield
    dist.destroy_process_group()


@pytest.fixture
def device(one_rank: None) -> Iterator[torch.device]:
    """With Megatron's groups of one rank."""
    yield init_megatron()
    parallel_state.destroy_model_parallel()
