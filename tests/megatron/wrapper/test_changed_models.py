"""What users do beside the plain loop trains to the weights of stock DDP.

Guards against traps A8 (missing gradients), G4, R1 and R2 (resharding inside recomputation), R5
(frozen modules), S1 and S3 (tied weights counted twice).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lib.gpt.changed_models import HABITS
from tests.lib.gpt.variants import STRATEGIES, Variant, compare, marked
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("megatron/wrapper/units.py", "core/engine/hooks.py", "core/engine/gather.py")

EVERY = tuple(
    replace(row, name=f"{row.name}, {world} ranks", strategies=STRATEGIES, world=world, full=True)
    for row in HABITS
    for world in (1, 2)
)


@pytest.mark.parametrize("row", marked(HABITS + EVERY))
@on_ranks()
def test_trains_to_the_same_weights(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)
