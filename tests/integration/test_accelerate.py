"""accelerate, transformers' Trainer, peft and TRL, unmodified, above `use_as_fsdp2`, beside the
same above torch's FSDP2.

Opt-in by what is installed: see docs/contributing/test_runs.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.ranks.launch import run_ranks

CHECKS = ("plain/accelerate.py", "plain/torch_fsdp.py", "plain/fsdp2.py", "plain/fsdp2_model.py")

pytestmark = pytest.mark.full


def test_what_they_print_is_what_they_print_with_fsdp2(tmp_path: Path) -> None:
    for name in ("accelerate", "transformers", "peft", "trl"):
        pytest.importorskip(name)
    from tests.lib.integration.hf_worker import compare

    run_ranks(compare, 2, tmp_path, timeout=400.0)
