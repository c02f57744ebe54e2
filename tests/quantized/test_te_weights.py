"""What this package makes of main weights is what Transformer Engine's own functions make of them,
run on the host with a stand-in for the extension."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.quantized import te_checks
from tests.quantized.te_extension import FOLDERS, standing_in
from tests.quantized.te_weights import NASTY, RECIPES

pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
)


def _on_rank(rank: int, world: int, folder: str) -> None:
    with standing_in(Path(folder)):
        for recipe in RECIPES:
            te_checks.one_to_eight_shards(rank, world, recipe)
            for nasty in NASTY:
                te_checks.shards_are_the_whole(rank, world, recipe, nasty, 2)
            for kind in ("cut", "first rank only"):
                te_checks.ranks_are_te(rank, world, recipe, kind)


@pytest.mark.parametrize("folder", FOLDERS)
def test_bytes_and_scales_of_shards_are_those_of_te(folder: Path) -> None:
    run_ranks(_on_rank, 2, str(folder))
