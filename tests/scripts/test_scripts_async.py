"""The training script with --async-save: what a person sees of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_runs import Train

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.checkpoint.record import read_record
from megatron_fsdp_adapter.cli import verify

FSDP = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy=optim_grads_params")


@pytest.mark.full
def test_a_run_that_saves_in_the_background_resumes_bit_for_bit(
    train: Train, tmp_path: Path
) -> None:
    root = tmp_path / "saved"
    name = f"{tmp_path.name}-"
    save = (f"--save={root}", "--async-save", "--save-interval=2", "--most-recent-k=2")
    whole = train(name + "whole", *FSDP, processes=2)
    first = train(name + "parts", *FSDP, *save, "--exit-interval=7", processes=2)
    assert first.keys() == set(range(1, 8))
    assert folders.complete_iterations(root) == (6, 7) and folders.half_written(root) == ()
    for iteration in (6, 7):
        folder = folders.final_folder(root, iteration)
        assert verify.examine(folder)["intact"]
        record = read_record(folder)
        assert record is not None and record.world_size == 2
        assert record.topology["data_parallel_sharding_strategy"] == "optim_grads_params"
    resumed = train(name + "parts", *FSDP, *save, f"--load={root}", "--check-digests", processes=2)
    for iteration, values in whole.items():
        assert resumed[iteration]["loss"] == values["loss"], iteration
        assert resumed[iteration]["grad_norm"] == values["grad_norm"], iteration
