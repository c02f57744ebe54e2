"""Megatron-Bridge, unmodified, loads Hugging Face weights into sharded models and exports them.

Opt-in, and with releases that know sharded weights (0.6 and later): see docs/tested.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.lm_runs import HARNESSES, finish, start
from tests.integration.test_bridge import missing_bridge

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def bridge() -> None:
    reason = missing_bridge("from megatron.bridge.models.conversion.model_bridge import DTensor")
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("case", ("llama-1-1", "llama-2-1", "moe-1-1", "moe-1-2", "adapters"))
def test_weights_go_in_and_out_of_live_models(case: str, tmp_path: Path) -> None:
    """FAMILY-TP-EP: logits are those of the Hugging Face model, exported tensors equal bit for bit,
    with and without sharded weights, whatever Megatron-Bridge is given; adapters are merged."""
    log = tmp_path / "log"
    arguments = [str(tmp_path / "hf"), case]
    worker = HARNESSES / "bridge_hf_worker.py"
    run = finish(start("bridge_on_cpu.py", worker, arguments, 2, log), log, 400.0)
    assert run.status == 0, run.end
    assert run.log.count("checked ") == 2 * (1 if case == "adapters" else 6)
