"""Megatron-Bridge, unmodified, loads Hugging Face weights into sharded models and exports them.

Opt-in: see docs/test_runs.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.lm_runs import HARNESSES, finish, start
from tests.integration.test_bridge import missing_bridge

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def bridge() -> None:
    reason = missing_bridge()
    if reason is not None:
        pytest.skip(reason)


def run(folder: Path, *cases: str) -> str:
    """The log of a worker of two ranks that has checked `cases`, one after the other."""
    log = folder / "log"
    worker = HARNESSES / "bridge_hf_worker.py"
    done = finish(start("bridge_on_cpu.py", worker, [str(folder), *cases], 2, log), log, 900.0)
    assert done.status == 0, done.end
    return done.log


def test_weights_go_in_and_out_of_live_models(tmp_path: Path) -> None:
    """Logits are those of the Hugging Face model, exported tensors equal bit for bit, under each
    strategy, whatever Megatron-Bridge is given; in bf16; with tied embeddings and biases."""
    assert run(tmp_path, "llama", "tied", "low").count("checked ") == 2 * (12 + 4 + 2)


def test_weights_go_in_and_out_where_tensor_parallelism_splits_them(tmp_path: Path) -> None:
    assert run(tmp_path, "llama-tp2", "tied-tp2").count("checked ") == 2 * (4 + 4)


def test_tied_embeddings_of_both_pipeline_stages_are_loaded(tmp_path: Path) -> None:
    assert run(tmp_path, "tied-pp2").count("checked ") == 2 * 4


def test_experts_go_in_and_out(tmp_path: Path) -> None:
    assert run(tmp_path, "moe").count("checked ") == 2 * 4


def test_experts_of_both_ranks_go_in_and_out(tmp_path: Path) -> None:
    numbers = "megatron.bridge.models.conversion.model_bridge._megatron_local_name_to_global"
    holder, _, name = numbers.rpartition(".")
    reason = missing_bridge(
        "import inspect; assert '.local_experts.' in inspect.getsource("
        f"b.importlib.import_module('{holder}').{name}), '{name} knows no local_experts'"
    )
    if reason is not None:  # 0.3 numbers experts that are one module each from zero on every rank
        pytest.skip(reason)
    assert run(tmp_path, "moe-ep2").count("checked ") == 2 * 4


def test_a_rank_holds_a_few_weights_at_a_time(tmp_path: Path) -> None:
    """A few times the largest, of all tensors that are made meanwhile."""
    assert run(tmp_path, "memory", "memory-tp2").count("checked ") == 2 * 2


def test_a_model_from_the_meta_device_takes_weights_and_is_saved(tmp_path: Path) -> None:
    assert run(tmp_path, "meta").count("checked ") == 2 * 2


def test_adapters_are_merged_into_what_is_exported(tmp_path: Path) -> None:
    assert run(tmp_path, "adapters", "adapters-tp2").count("checked ") == 2 * 2
