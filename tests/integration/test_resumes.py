"""Megatron-LM's pretrain_gpt.py is resumed with changed flags, under its own DDP and under the
wrapper: the same digits, or both stop. docs/checkpoint.md lists the exceptions.

Opt-in, as `test_megatron_lm.py`: set MEGATRON_LM_PATH, and use --full. Needs core 0.19 or newer:
before, Megatron's DDP ignores some changes without a word.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from tests.lib.integration import lm_log
from tests.lib.integration.lm_runs import Run, train

CHECKS = (
    "megatron/optimizer/group_options.py",
    "megatron/optimizer/param_scheduler.py",
    "megatron/checkpoint/checkpoint_drivers.py",
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif("max_lr" not in param_group_identifier_keys, reason="begins with core 0.19"),
]

SIDES = {
    "stock": "--use-distributed-optimizer --no-gradient-accumulation-fusion "
    "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable",
    "ours": "--use-megatron-fsdp",
}
OVERRIDE = "--override-opt-param-scheduler"
CHECKPOINTS = "--use-checkpoint-opt_param-scheduler"
SAVED_STEPS = 2

EQUAL = "equal"
"""Both print the same digits."""
STOP = "stop"
"""Both stop before a step. The wrapper's error has the words of the row."""
RUNS = "the run's"
"""Stock stops. The learning rates are those of a run of stock that began with the flags."""
OLD = "the checkpoint's"
"""Stock stops. The digits are those of a resume without the change."""
REFUSED = "refused"
"""Stock goes on with wrong numbers. The wrapper stops, with the words of the row."""


@dataclass(frozen=True)
class Resume:
    """Flags of a resumed run, and its outcome.

    flags: beside those of the saved run, `base`; or, with `instead`, in their place. words: of the
    wrapper's log. last_digit: units of the last printed digit by which digits may differ."""

    flags: str
    outcome: str = EQUAL
    words: tuple[str, ...] = ()
    base: str = ""
    instead: bool = False
    last_digit: int = 0


def _flagged(change: str, *words: str, base: str = "", last_digit: int = 0) -> tuple[Resume, ...]:
    """A change of the schedule: refused without a flag, taken or undone with one of them."""
    return (
        Resume(change, STOP, words, base),
        Resume(f"{change} {OVERRIDE}", base=base, last_digit=last_digit),
        Resume(f"{change} {CHECKPOINTS}", base=base, last_digit=last_digit),
    )


FASTER = "--lr 5e-3 --min-lr 5e-4"
OWN_RATE = "--decoupled-lr 5e-2 --decoupled-min-lr 1e-3"
OTHER_RATE = "--decoupled-lr 3e-2 --decoupled-min-lr 1e-3"
QK = "--qk-layernorm"
QK_DECAY = f"{QK} --apply-wd-to-qk-layernorm"
GROWING = "--start-weight-decay 0.1 --end-weight-decay 0.3 --weight-decay-incr-style linear"
WSD = "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters"
WARM = "--lr-warmup-iters 4"
TOLD = "optimizer state: "

RESUMES = (
    Resume(""),
    # The learning rate.
    Resume(FASTER, STOP, ("max_lr=0.005 (--lr)", "has 0.001", "min_lr=0.0005", OVERRIDE)),
    Resume("--min-lr 5e-4", STOP, ("min_lr=0.0005 (--min-lr)", "has 0.0001")),
    Resume(f"{FASTER} {OVERRIDE}", RUNS, (f"{TOLD}max_lr=0.005 of this run, not 0.001",)),
    Resume(f"{FASTER} {CHECKPOINTS}", OLD, (f"{TOLD}max_lr=0.001 of the checkpoint, not 0.005",)),
    Resume(f"{FASTER} {OVERRIDE}", RUNS, base=OWN_RATE),
    # The schedule.
    *_flagged("--lr-decay-style cosine", "lr_decay_style='cosine' (--lr-decay-style)", "'linear'"),
    *_flagged("--lr-decay-iters 20", "lr_decay_steps=80 (--lr-decay-iters", "has 40"),
    *_flagged(WARM, "lr_warmup_steps=16 (--lr-warmup-iters", "has 0"),
    Resume(f"{FASTER} --train-iters 8", STOP, ("max_lr=0.005 (--lr)", "wd_incr_steps=32")),
    *_flagged("--train-iters 8", "wd_incr_steps=32 (--train-iters", "has 24"),
    *_flagged("--weight-decay 0.3", "start_wd=0.3 (--weight-decay", "end_wd=0.3", "has 0.01"),
    *_flagged(GROWING, "wd_incr_style='linear' (--weight-decay-incr-style)", "end_wd=0.3"),
    *_flagged("--global-batch-size 8", "lr_decay_steps=80", "--global-batch-size", last_digit=1),
    Resume(f"{WSD} 2", base=f"{WSD} 4"),
    Resume(f"{WARM} --lr-warmup-init 1e-4", base=WARM),
    # A rate of its own.
    Resume("", base=OWN_RATE),
    Resume(OVERRIDE, base=OWN_RATE),
    *(
        Resume(f"{OWN_RATE} {flag}", STOP, ("max_lr=0.05 (--decoupled-lr or", "has 0.001"))
        for flag in ("", OVERRIDE, CHECKPOINTS)
    ),
    Resume(OTHER_RATE, STOP, ("max_lr=0.03 (--decoupled-lr or", "has 0.05"), OWN_RATE),
    Resume(f"{OTHER_RATE} {OVERRIDE}", STOP, ("max_lr=0.03 (--decoupled-lr",), OWN_RATE),
    *(
        Resume(flag, EQUAL, (f"{TOLD}max_lr=0.001 of this run, not 0.05",), OWN_RATE, True)
        for flag in ("", OVERRIDE, CHECKPOINTS)
    ),
    # Weight decay of other parameters.
    Resume(QK_DECAY, EQUAL, (f"{TOLD}wd_mult=1.0 of this run, not 0.0",), QK),
    Resume(QK, EQUAL, (f"{TOLD}wd_mult=0.0 of this run, not 1.0",), QK_DECAY, True),
    Resume("", base=QK_DECAY),
    # The optimizer.
    Resume("--adam-beta2 0.9", words=(f"{TOLD}betas=(0.9, 0.999) of the checkpoint, not",)),
    Resume(f"--adam-beta1 0.8 {OVERRIDE}", words=(f"{TOLD}betas=(0.9, 0.999) of the checkpoint",)),
    Resume("--adam-eps 1e-4", words=(f"{TOLD}eps=1e-08 of the checkpoint, not 0.0001",)),
    Resume("--optimizer sgd", STOP, ("momentum_buffer",)),
    # Without the optimizer's state.
    Resume("--no-load-optim"),
    Resume(f"--no-load-optim {FASTER}"),
    Resume("--finetune"),
    Resume(f"--finetune {OWN_RATE}"),
    Resume("--no-save-optim", REFUSED, ("no_save_optim=True: Megatron-LM", "Add --no-load-optim")),
    Resume("", STOP, ("has no optimizer state", "Add --no-load-optim"), "--no-save-optim", True),
    Resume("--no-load-optim", base="--no-save-optim", instead=True),
)  # fmt: skip

_RATE = re.compile(r"iteration\s+(\d+)/.* learning rate: (\S+)")


def _name(case: Resume) -> str:
    return f"({case.base}) -> {'' if case.instead else '+ '}{case.flags} {case.outcome}"


def rates(run: Run) -> dict[int, str]:
    """The learning rate that was printed in each iteration."""
    found = (_RATE.search(line) for line in run.log.splitlines())
    return {int(match[1]): match[2] for match in found if match}


Trained = Callable[[str, str], Run]


@pytest.fixture(scope="module")
def trained(megatron_lm: Path) -> Trained:
    def run(side: str, flags: str) -> Run:
        common = f"--mock-data --eval-iters 0 --save-interval 2 {SIDES[side]} {flags}"
        return train(megatron_lm, shlex.split(common))

    return run


@pytest.fixture(scope="module")
def saved(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder that a side has saved after two steps with some flags, once for each."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(side: str, base: str) -> Path:
        if (side, base) not in folders:
            root = tmp_path_factory.mktemp("saved")
            run = trained(side, f"{base} --save {root} --exit-interval {SAVED_STEPS}")
            assert run.status == 0, run.end
            folders[side, base] = root
        return folders[side, base]

    return folder


@pytest.mark.parametrize("case", RESUMES, ids=_name)
def test_a_resume_with_changed_flags_is_that_of_ddp(
    trained: Trained, saved: Callable[[str, str], Path], case: Resume
) -> None:
    flags = case.flags if case.instead else f"{case.base} {case.flags}"
    found = {side: trained(side, f"{flags} --load {saved(side, case.base)}") for side in SIDES}
    ours, stock = found["ours"], found["stock"]
    for word in case.words:
        assert word in ours.log, ours.end
    if case.outcome in (STOP, REFUSED):
        assert ours.status != 0
        assert rates(ours) == {}
        if case.outcome == STOP:
            assert "Error" in ours.log
        else:  # before the model is made, without a traceback
            assert "cannot be used with" in ours.log
        assert (stock.status != 0) is (case.outcome == STOP) or "nan" in stock.log.lower()
        return
    assert ours.status == 0, ours.end
    if case.outcome == RUNS:
        assert stock.status != 0
        fresh = trained("stock", flags.replace(OVERRIDE, ""))
        assert rates(ours) == {n: rate for n, rate in rates(fresh).items() if n > SAVED_STEPS}
        return
    if case.outcome == OLD:
        assert stock.status != 0
        stock = trained("stock", f"{case.base} --load {saved('stock', case.base)}")
    assert stock.status == 0, stock.end
    assert rates(ours) == rates(stock)
    assert lm_log.differences(stock.values, ours.values, last_digit=case.last_digit) == []
