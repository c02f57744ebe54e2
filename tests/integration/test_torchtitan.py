"""Decoders of torchtitan, parallelized by its own functions, beside the same above torch's FSDP2.

Opt-in by what is installed: see docs/contributing/test_runs.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.ranks.launch import run_ranks

CHECKS = ("plain/torch_fsdp.py", "plain/fsdp2.py", "plain/fsdp2_model.py", "plain/mesh.py")

pytestmark = pytest.mark.full


@pytest.mark.parametrize("world", (2, 4))
def test_decoders_have_the_bits_of_fsdp2(tmp_path: Path, world: int) -> None:
    for name in ("torchtitan", "spmd_types", "triton"):
        pytest.importorskip(name)
    from tests.lib.integration.titan_worker import compare

    run_ranks(compare, world, tmp_path, timeout=500.0)
