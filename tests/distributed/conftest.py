from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.one_rank import as_one_of_many


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A gloo world of this process alone, without Megatron."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    with as_one_of_many():
        yield
    dist.destroy_process_group()
