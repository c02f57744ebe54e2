"""Training with each strategy gives the numbers of stock DDP with the distributed optimizer.

Guards against traps G1 and G8 (scale on the accumulated shard, groups of one rank), G3
(average_in_collective), G4 (norm of replicated gradients), H7 (norm over the wrong group) and M8 (a
step spent on making optimizer state). Sums in low precision: test_precision_matrix.py.
"""

from __future__ import annotations

import pytest

from tests.lib.gpt.numerics import ROWS
from tests.lib.gpt.variants import (
    Variant,
    compare,
    marked,
)
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "core/engine/engine.py",
    "megatron/wrapper/construction.py",
    "megatron/optimizer/optimizer.py",
    "optim/local_shards.py",
)


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_trains_like_stock_ddp(row: Variant, rank: int, seed: int) -> None:
    """Weight decay, clipping at 1.0, three microbatches, uneven shapes; and what the row says."""
    compare(row, rank, seed)
