from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron.core import parallel_state

from tests.lib.gpt.gpt import init_megatron


@pytest.fixture
def device(one_rank: None) -> Iterator[torch.device]:
    """With Megatron's groups of one rank."""
    yield init_megatron()
    parallel_state.destroy_model_parallel()
