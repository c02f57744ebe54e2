from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.scripts.script_runs import Train

CHECKS = ("megatron/wrapper/gpt_model.py", "megatron/wrapper/adapter.py")

FSDP = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy=optim_grads_params")
DROPOUT = ("--bf16", "--hidden-dropout=0.1", "--attention-dropout=0.1")
LAST = 12
UNTRAINED = 5.5  # log of the 257 ids that occur


def test_stock_ddp_learns(train: Train) -> None:
    reference = train("reference")
    assert reference.keys() == set(range(1, LAST + 1))
    assert reference[1]["loss"] > UNTRAINED
    assert reference[LAST]["loss"] < reference[1]["loss"] - 0.5
    assert reference[LAST]["validation_loss"] < reference[6]["validation_loss"] < UNTRAINED
    assert reference[LAST]["tokens_per_second"] > 0
    assert reference[LAST]["peak_memory_bytes"] > 10**8
    assert "validation_loss" not in reference[5]


@pytest.mark.full
@pytest.mark.parametrize("flags", [FSDP, (*FSDP, *DROPOUT)], ids=["fp32", "bf16-dropout"])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    train: Train, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    name = f"{tmp_path.name}-"
    save = f"--save={tmp_path / 'saved'}"
    load = f"--load={tmp_path / 'saved'}"
    whole = train(name + "whole", *flags, processes=2)
    first = train(name + "parts", *flags, save, load, "--exit-interval=7", processes=2)
    assert first.keys() == set(range(1, 8))
    parts = train(name + "parts", *flags, save, load, processes=2)
    assert whole.keys() == parts.keys()
    for iteration, record in whole.items():
        for name in {"loss", "grad_norm", "validation_loss"} & record.keys():
            assert parts[iteration][name] == record[name], f"{name} of iteration {iteration}"
