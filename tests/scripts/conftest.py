from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.scripts.script_runs import SCRIPTS, TINY, Log, Train, run_script

sys.path.insert(0, str(SCRIPTS))


@pytest.fixture
def cpu_mode_off() -> Iterator[None]:
    """CPU mode off for the test, and afterwards as it was before."""
    from megatron_fsdp_adapter.launch import cpu_mode
    from tests.lib.ranks.on_the_cpu import cpu_mode_enabled

    was_on = cpu_mode_enabled()
    cpu_mode.disable_cpu_mode()
    yield
    cpu_mode.disable_cpu_mode()
    if was_on:
        cpu_mode.enable_cpu_mode()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix of prepared data: the beginning of the standard library."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    done = run_script(
        "prepare_data.py", f"--output-prefix={prefix}", "--max-bytes=300000", "--valid-share=0.2"
    )
    assert done.returncode == 0, done.stderr
    for word in ("documents", "tokens", "text_valid"):
        assert word in done.stdout
    return prefix


@pytest.fixture(scope="session")
def train(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """``train(name, *flags, processes=1)``: a run of a tiny model, its log by iteration.

    Runs of one name share a log, as a resumed run and the one before it do.
    """
    folder = tmp_path_factory.mktemp("logs")

    def run(name: str, *flags: str, processes: int = 1) -> Log:
        from loss_curves import read_log

        log = folder / f"{name}.jsonl"
        done = run_script(
            "pretrain_gpt.py",
            *TINY,
            f"--train-data-path={corpus}_train",
            f"--valid-data-path={corpus}_valid",
            f"--data-cache-path={corpus.parent / 'cache'}",
            f"--loss-log-file={log}",
            *flags,
            processes=processes,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return read_log(log)

    return run
