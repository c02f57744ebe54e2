"""Models that transformers shards while it loads them (`DistributedConfig`), beside the same above
torch's FSDP2.

Opt-in by what is installed: see docs/contributing/test_runs.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.ranks.launch import run_ranks

CHECKS = ("plain/torch_fsdp.py", "plain/fsdp2.py", "plain/sharded_params.py")

pytestmark = pytest.mark.full


@pytest.mark.parametrize("world", (2, 4))
def test_models_have_the_bits_of_fsdp2(tmp_path: Path, world: int) -> None:
    pytest.importorskip("transformers", minversion="5.20")
    from tests.lib.integration.transformers_worker import compare

    run_ranks(compare, world, tmp_path, timeout=300.0)


def test_tied_embeddings_are_trained_as_without_sharding(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.20")
    from tests.lib.integration.transformers_worker import compare_tied

    run_ranks(compare_tied, 2, tmp_path, timeout=300.0)
