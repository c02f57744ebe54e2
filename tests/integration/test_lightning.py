"""Lightning's `ModelParallelStrategy` with tensor parallelism, beside the same above torch's FSDP2.

Opt-in by what is installed: see docs/contributing/test_runs.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.ranks.launch import run_ranks

CHECKS = ("plain/torch_fsdp.py", "plain/fsdp2.py", "plain/fsdp2_model.py")

pytestmark = pytest.mark.full


def test_loops_have_the_bits_of_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from tests.lib.integration.lightning_worker import compare

    run_ranks(compare, 4, tmp_path, timeout=300.0)
