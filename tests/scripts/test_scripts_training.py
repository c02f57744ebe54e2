from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lib import checkpoints

from megatron_fsdp_adapter.checkpoint.dcp import save_checkpoint
from megatron_fsdp_adapter.core.problems import RefusedByAllRanks
from tests.lib.ranks.launch import run_ranks
from tests.lib.ranks.one_rank import world_of_one
from tests.lib.scripts.script_runs import TINY, Train, run_script

CHECKS = (
    "megatron/wrapper/gpt_model.py",
    "megatron/wrapper/adapter.py",
    "megatron/optimizer/param_scheduler.py",
)

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


LONGER = ("--lr=6e-3", "--train-iters=6")
"""Flags of a resume after 2 of 4 steps with the learning rate 3e-3, which falls linearly to 0."""
CHANGES = ("max_lr=0.006", "lr_decay_steps=48", "wd_incr_steps=48")
RESUMES = [
    # A flag, words of the log, and the logged learning rates; none if the run is refused.
    ("", [f"- {change} (--" for change in CHANGES], {}),
    pytest.param(
        "--override-opt-param-scheduler",
        [f"schedule: {change} of this run, not " for change in CHANGES],
        {3: 3e-3, 4: 2e-3, 5: 1e-3, 6: 0},
        marks=pytest.mark.full,
    ),
    pytest.param(
        "--use-checkpoint-opt_param-scheduler",
        ["schedule: lr_decay_steps=32 of the checkpoint, not 48 of this run"],
        {3: 0.75e-3, 4: 0, 5: 0, 6: 0},
        marks=pytest.mark.full,
    ),
]


@pytest.fixture(scope="module")
def saved_half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of 4 steps that stopped after 2."""
    root = tmp_path_factory.mktemp("half") / "saved"
    flags = (f"--save={root}", "--train-iters=4", "--exit-interval=2")
    done = run_script("pretrain_gpt.py", *TINY, *FSDP, "--mock-data", "--eval-iters=0", *flags)
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize(("flag", "words", "rates"), RESUMES)
def test_another_schedule_is_resumed_with_a_flag_that_says_which(
    saved_half: Path, tmp_path: Path, flag: str, words: list[str], rates: dict[int, float]
) -> None:
    from loss_curves import read_log

    log = tmp_path / "log.jsonl"
    flags = [*FSDP, *LONGER, f"--load={saved_half}", f"--loss-log-file={log}", *flag.split()]
    done = run_script("pretrain_gpt.py", *TINY, "--mock-data", "--eval-iters=0", *flags)
    for word in words:
        assert word in done.stdout + done.stderr, done.stderr
    if not rates:
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return
    assert done.returncode == 0, done.stderr
    found = {iteration: record["learning_rate"] for iteration, record in read_log(log).items()}
    assert found == pytest.approx(rates)


def _own_where_it_is_seen(rank: int, size: int, root: str) -> None:
    own = root if rank == 0 else f"{root}/absent"
    with pytest.raises(RefusedByAllRanks, match=r"rank 1: .*absent does not exist"):
        checkpoints.require_own(own)


def test_a_checkpoint_that_one_rank_does_not_see_is_an_error_on_all(tmp_path: Path) -> None:
    """Before: the other rank went on, into a collective call."""
    with world_of_one():
        save_checkpoint(tmp_path, 3, {"world_size": 1})
    run_ranks(_own_where_it_is_seen, 2, str(tmp_path))


FOREIGN = {
    # Before: `missing: world_size, args....`, under a traceback.
    "saved": "iter_0000003 was not saved by scripts/pretrain_gpt.py",
    # Before: two tracebacks, and that the folder has no complete checkpoint.
    "saved/iter_0000003": "is one iteration. Name the folder that it is in",
    ".": "latest_checkpointed_iteration.txt does not exist",
}
"""What --load names, and words of the message."""


@pytest.mark.parametrize("load", FOREIGN)
def test_a_load_that_cannot_be_is_refused_in_one_message(tmp_path: Path, load: str) -> None:
    with world_of_one():
        save_checkpoint(tmp_path / "saved", 3, {"model": {"weight": torch.ones(2)}})
    flags = (*FSDP, f"--load={tmp_path / load}", "--mock-data", "--eval-iters=0")
    done = run_script("pretrain_gpt.py", *TINY, *flags)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert FOREIGN[load] in done.stderr
