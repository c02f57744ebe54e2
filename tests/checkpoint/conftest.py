from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from tests.distributed.gpt import init_megatron

# Spawned ranks import the helper modules of these folders by name.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]


@pytest.fixture
def device(one_rank: None) -> Iterator[torch.device]:
    """With Megatron's groups of one rank."""
    yield init_megatron()
    parallel_state.destroy_model_parallel()
