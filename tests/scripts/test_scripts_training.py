from __future__ import annotations

from pathlib import Path

import pytest
from script_runs import Log, Train

from megatron_fsdp_adapter.core.config import STRATEGIES

DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
FSDP = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy=optim_grads_params")
DROPOUT = ("--bf16", "--hidden-dropout=0.1", "--attention-dropout=0.1")
LAST = 12
UNTRAINED = 5.5  # log of the 257 ids that occur

full = pytest.mark.full


def _same(first: Log, second: Log, relative: float) -> None:
    assert first.keys() == second.keys()
    for iteration, record in first.items():
        for name in {"loss", "grad_norm", "validation_loss"} & record.keys():
            assert second[iteration][name] == pytest.approx(record[name], rel=relative, abs=0), (
                f"{name} of iteration {iteration}"
            )


def test_stock_ddp_learns(reference: Log) -> None:
    assert reference.keys() == set(range(1, LAST + 1))
    assert reference[1]["loss"] > UNTRAINED
    assert reference[LAST]["loss"] < reference[1]["loss"] - 0.5
    assert reference[LAST]["validation_loss"] < reference[6]["validation_loss"] < UNTRAINED
    assert reference[LAST]["tokens_per_second"] > 0
    assert reference[LAST]["peak_memory_bytes"] > 10**8
    assert "validation_loss" not in reference[5]


RUNS = {
    "stock": DISTRIBUTED,
    **{strategy: ("--use-megatron-fsdp", f"--data-parallel-sharding-strategy={strategy}")
       for strategy in STRATEGIES},
}  # fmt: skip


@full
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_like_stock_ddp_on_one(train: Train, reference: Log, name: str) -> None:
    _same(reference, train(name, *RUNS[name], processes=2), relative=1e-5)


@full
@pytest.mark.parametrize("flags", [FSDP, (*FSDP, *DROPOUT)], ids=["fp32", "bf16-dropout"])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    train: Train, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    name = f"{tmp_path.name}-"
    save, load = f"--save={tmp_path / 'saved'}", f"--load={tmp_path / 'saved'}"
    whole = train(name + "whole", *flags, processes=2)
    first = train(name + "parts", *flags, save, load, "--exit-interval=7", processes=2)
    assert first.keys() == set(range(1, 8))
    parts = train(name + "parts", *flags, save, load, processes=2)
    _same(whole, parts, relative=0)
