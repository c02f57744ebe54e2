from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.one_rank import as_one_of_many, world_of_one


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A gloo world of this process alone, without Megatron, that stands for one of many."""
    with world_of_one(), as_one_of_many():
        yield
