"""--async-save of Megatron-LM's unmodified pretrain_gpt.py: safe, and the same training.

Opt-in like `test_pretrain_gpt.py`:

    MEGATRON_LM_PATH=path/to/Megatron-LM python -m pytest --full tests/integration
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.checkpoint.record import read_record
from megatron_fsdp_adapter.cli import verify
from tests.integration import lm_log
from tests.integration.lm_runs import launch, train

pytestmark = pytest.mark.full

COMMON = ("--mock-data", "--use-megatron-fsdp")


@pytest.fixture(autouse=True)
def saves_asynchronously(megatron_lm: Path) -> None:
    source = (megatron_lm / "megatron" / "training" / "async_utils.py").read_text()
    if "get_async_strategy" not in source:
        pytest.skip("this Megatron-LM has no get_async_strategy: it saves asynchronously only in "
                    "the torch_dist format")  # fmt: skip


def test_a_run_that_saves_asynchronously_trains_and_resumes_as_one_that_does_not(
    megatron_lm: Path, tmp_path: Path
) -> None:
    """In every printed digit, with a save in each step, each while the next step runs."""
    plain = train(megatron_lm, [*COMMON])
    root = tmp_path / "saved"
    saving = [*COMMON, "--async-save", "--save", str(root), "--save-interval", "1"]
    whole = train(megatron_lm, saving)
    assert whole.status == 0, whole.end
    assert lm_log.differences(plain.values, whole.values) == []
    assert "scheduled an async checkpoint save" in whole.log
    assert "Disabling --async-save" not in whole.log
    assert folders.complete_iterations(root) == (1, 2, 3, 4, 5, 6)
    assert folders.half_written(root) == () and folders.read_tracker(root) == 6
    for iteration in (1, 6):
        folder = folders.final_folder(root, iteration)
        assert verify.examine(folder)["intact"]
        record = read_record(folder)
        assert record is not None and record.topology["data_parallel_sharding_strategy"] == (
            "optim_grads_params"
        )
    folders.write_atomically(root / folders.TRACKER, "2")
    resumed = train(megatron_lm, [*saving, "--load", str(root)])
    assert resumed.status == 0, resumed.end
    assert (2, "lm loss") not in resumed.values, "it started again from the beginning"
    assert resumed.values[3, "grad norm"] == plain.values[3, "grad norm"]
    assert lm_log.differences(plain.values, resumed.values, start=5) == []


def _tracked(root: Path) -> int:
    """The iteration that the tracker names; 0 without one."""
    return folders.read_tracker(root) if (root / folders.TRACKER).is_file() else 0


def test_a_killed_asynchronous_save_is_never_the_one_that_is_loaded(
    megatron_lm: Path, tmp_path: Path
) -> None:
    """As `test_a_killed_save_is_never_the_one_that_is_loaded`, with a thread that writes. Folders
    are there before the tracker names the checkpoint in front of them."""
    root, chance, found = tmp_path / "saved", random.Random(1), [0]
    common = [*COMMON, "--async-save", "--save", str(root), "--load", str(root),
              "--save-interval=1", "--train-iters=10000"]  # fmt: skip
    for number in range(4):
        killed = launch(megatron_lm, [*common, "--data-cache-path", str(tmp_path / "cache")],
                        tmp_path / f"log{number}")  # fmt: skip
        deadline = time.monotonic() + 240
        while (
            _tracked(root) <= found[-1]
            and time.monotonic() < deadline
            and killed[0].poll() is None
        ):
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.3))
        for process in killed:
            process.kill()
            process.wait()
        found.append(_tracked(root))
        assert verify.examine(folders.final_folder(root, found[-1]))["intact"]
        record = read_record(folders.final_folder(root, found[-1]))
        assert record is not None and (record.world_size, record.iteration) == (2, found[-1])
    assert found == sorted(set(found)), "a run did not resume what the one before it left"
    last = train(megatron_lm, [*common, "--exit-interval=1"])
    assert last.status == 0, last.end
    assert f"at iteration {found[-1]}" in last.log
    assert folders.half_written(root) == ()
