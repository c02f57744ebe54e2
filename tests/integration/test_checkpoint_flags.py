"""Every flag of Megatron-LM about checkpoints that works saves and resumes, with its own unmodified
pretrain_gpt.py through the runner. Those without effect are all given at once."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.megatron.options.checkpoint_flags import (
    CHECKPOINT_FLAGS,
    CHECKPOINT_RULES,
    NO_EFFECT,
    NOT_RUN,
    REFUSED,
    WORKS,
)
from tests.lib.integration.lm_flags import flags_of
from tests.lib.integration.lm_runs import TP2, Run, train

CHECKS = (
    "megatron/options/checkpoint_flags.py",
    "megatron/checkpoint/load_paths.py",
    "megatron/checkpoint/strictness.py",
    "megatron/checkpoint/checkpoint_drivers.py",
)

FULL = pytest.mark.full
OURS = "--use-megatron-fsdp"
STOCK = (
    "--use-distributed-optimizer --no-gradient-accumulation-fusion --ckpt-format torch_dist "
    "--dist-ckpt-optim-fully-reshardable"
)
STEPS = 4
SWIGLU = "--swiglu --position-embedding-type rope"
GLOBAL = "--non-persistent-ckpt-type global --non-persistent-save-interval 1"
BESIDE = "--non-persistent-global-ckpt-dir {root}/beside"
WITHOUT_STATES = "--no-load-optim --no-load-rng"
FROM_CHECKPOINT = (
    "--use-checkpoint-args --use-mp-args-from-checkpoint-args "
    "--no-use-tokenizer-model-from-checkpoint-args"
)


@dataclass(frozen=True)
class Case:
    """A run that saves into {root}, and one that resumes: as one that never stopped.

    saved, resumed: flags; saves_at: the iteration that is resumed; stored: the folders that are
    there then; whole: flags of the run that never stops."""

    saved: str
    resumed: str
    saves_at: int = 2
    stored: tuple[str, ...] = ()
    whole: str = ""


SAVES = "--save {root}/a --save-interval 2 --exit-interval 2"
LOADS = "--load {root}/a"

RESUMES: dict[str, Case] = {
    "the format is set by itself": Case(f"{SAVES} --ckpt-format fsdp_dtensor", LOADS),
    "second names": Case(
        "--save {root}/a --persistent-save-interval 2 --exit-interval 2",
        f"{LOADS} --disable-strict-fsdp-dtensor-load",
    ),
    "global": Case(
        f"--save {{root}}/a --save-interval 2 --exit-interval 3 {GLOBAL}", f"{LOADS} {GLOBAL}", 3,
        ("a/iter_0000002", "a/non_persistent/iter_0000001", "a/non_persistent/iter_0000003"),
    ),
    "global, in a folder of their own": Case(
        f"--save {{root}}/a --save-interval 100 --exit-interval 3 {GLOBAL} {BESIDE}",
        f"{LOADS} {GLOBAL} {BESIDE}", 3, ("beside/iter_0000002", "beside/iter_0000003"),
    ),
    "global, and newer ones that stay": Case(
        f"--save {{root}}/a --save-interval 3 --exit-interval 3 {GLOBAL}", f"{LOADS} {GLOBAL}", 3,
        ("a/iter_0000003", "a/non_persistent/iter_0000001", "a/non_persistent/iter_0000002"),
    ),
    "global, with arguments of the checkpoint": Case(
        f"--save {{root}}/a --save-interval 100 --exit-interval 3 {GLOBAL} {SWIGLU}",
        f"{LOADS} {GLOBAL} {FROM_CHECKPOINT}", 3, whole=SWIGLU,
    ),
    "arguments of the checkpoint": Case(
        f"{SAVES} {SWIGLU} {TP2}", f"{LOADS} {FROM_CHECKPOINT}", whole=f"{SWIGLU} {TP2}"
    ),
    "some are deleted": Case(
        "--save {root}/a --save-interval 1 --save-retain-interval 2 --exit-interval 3", LOADS, 3,
        ("a/iter_0000002", "a/iter_0000003"),
    ),
    "a chosen iteration": Case(
        "--save {root}/a --save-interval 1 --exit-interval 3", f"{LOADS} --ckpt-step 2"
    ),
    "in the background": Case(f"{SAVES} --async-save", f"{LOADS} --async-save"),
    "checked": Case(SAVES, f"{LOADS} --dist-ckpt-strictness raise_all"),
}  # fmt: skip

LIKE_STOCK: dict[str, str] = {
    "finetune": f"{LOADS} --finetune",
    "pretrained": "--pretrained-checkpoint {root}/a --load {root}/none",
    "pretrained alone": "--pretrained-checkpoint {root}/a",
    "without states": f"{LOADS} {WITHOUT_STATES}",
    "main weights": f"{LOADS} {WITHOUT_STATES} --load-main-params-from-ckpt",
    "another iteration": f"{LOADS} --override-ckpt-iteration 1",
    "published": "--load {root}/published",
    "dropped biases": f"{LOADS} --finetune --disable-bias-linear",
}
"""Flags of runs that print what stock DDP prints from its own checkpoint of the same run."""

MISSING = "--load {root}/none --exit-on-missing-checkpoint"
NOT_SAVED = f"{SAVES} --no-save-optim --no-save-rng"
DROPPED = f"{LOADS} --finetune --num-layers 1"
LENIENT = f"{LOADS} --finetune --qk-layernorm --no-strict-fsdp-dtensor-load"

VALUES: dict[str, str] = {
    "--ckpt-convert-save": "{root}/converted", "--async-strategy": "mcore",
    "--non-persistent-local-ckpt-dir": "{root}/local", "--non-persistent-local-ckpt-algo": "atomic",
    "--replication-jump": "1", "--replication-factor": "3", "--async-ckpt-cpu-priority": "5",
    "--async-ckpt-io-priority": "2", "--dist-ckpt-workers": "2",
    "--ckpt-fully-parallel-load-exchange-algo": "gather_rounds",
    "--ckpt-fully-parallel-save-process-group": "ep_dp",
    "--ckpt-fully-parallel-load-process-group": "ep_dp",
    "--ckpt-pg-tensors-cache-path": "{root}/groups", "--dist-ckpt-format": "torch_dist",
}  # fmt: skip
"""What flags without effect are given; others take no value."""
ELSEWHERE = ("--load-main-params-from-ckpt",)
"""Without effect, and not without other flags."""
SECOND_NAMES = re.compile("^--disable-")
"""Of flags of which one name is given."""

ASKED = {
    "--ckpt-convert-format": "torch --ckpt-convert-save {root}/b",
    "--non-persistent-save-interval": "1",
    "--dist-ckpt-strictness": "return_all",
    "--verify-integrity": "",
    "--replication": "",
    "--save-wgrads-interval": "1",
    "--save-params-interval": "1",
    "--ckpt-convert-update-legacy-dist-opt-format": "",
}
"""What is refused, with the value that is."""


def _flags(state: str) -> list[str]:
    return [flag for row in CHECKPOINT_FLAGS if row.state == state for flag in row.flags]


def test_every_row_of_the_table_is_run_here() -> None:
    given = [
        *(f"{case.saved} {case.resumed}" for case in RESUMES.values()),
        *LIKE_STOCK.values(), MISSING, NOT_SAVED, DROPPED, LENIENT,
    ]  # fmt: skip
    used = set(re.findall(r"--[a-z0-9-]+", " ".join(given)))
    assert [f for f in _flags(WORKS) if f not in used and not SECOND_NAMES.search(f)] == []
    assert set(VALUES) <= set(_flags(NO_EFFECT))
    assert set(_flags(REFUSED)) <= set(ASKED)
    states = {row.state for row in CHECKPOINT_FLAGS}
    assert states == {WORKS, NO_EFFECT, REFUSED, NOT_RUN}
    for row in CHECKPOINT_FLAGS:
        assert bool(row.rules) or row.state != REFUSED, row.flags
        options = {flag.removeprefix("--").replace("-", "_") for flag in row.flags}
        assert {rule.option for rule in row.rules} <= options, row.flags


Trained = Callable[..., Run]


@pytest.fixture(scope="module")
def flags_of_parser(megatron_lm: Path) -> set[str]:
    return set(flags_of(megatron_lm))


@pytest.fixture(scope="module")
def trained(megatron_lm: Path, flags_of_parser: set[str]) -> Trained:
    """A run with these flags, which ends with this status."""

    @functools.cache
    def run(flags: str, status: int = 0) -> Run:
        if "--async-save" in flags and "--async-strategy" not in flags_of_parser:
            pytest.skip("this Megatron-LM saves asynchronously only in the torch_dist format")
        if "--override" in flags and "--override-ckpt-iteration" not in flags_of_parser:
            pytest.skip("this Megatron-LM has no --override-ckpt-iteration")
        everything = f"--mock-data --train-iters {STEPS} --eval-interval {STEPS} {flags}"
        done = train(megatron_lm, everything.split())
        assert done.status == status, done.end
        return done

    return run


def _numbers(run: Run, first: int) -> dict[tuple[int, str], str]:
    """What is printed from iteration `first` on, but losses behind the first one: Megatron-LM
    averages the first two after a resume."""
    found = {}
    for (step, what), number in run.values.items():
        if step >= first and (what != "lm loss" or step == first):
            found[step, what] = number
    return found


@FULL
@pytest.mark.parametrize("name", RESUMES)
def test_a_resumed_run_is_one_that_never_stopped(
    trained: Trained, tmp_path: Path, name: str
) -> None:
    case = RESUMES[name]
    trained(f"{OURS} {case.saved.format(root=tmp_path)}")
    for stored in case.stored:
        assert (tmp_path / stored / ".metadata").is_file(), stored
    if case.stored:
        found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("iter_*")}
        assert found == set(case.stored)
    resumed = trained(f"{OURS} {case.resumed.format(root=tmp_path)}")
    assert min(step for step, _ in resumed.values) == case.saves_at + 1
    wanted = _numbers(trained(f"{OURS} {case.whole}"), case.saves_at + 1)
    assert _numbers(resumed, case.saves_at + 1) == wanted


@FULL
def test_flags_without_effect_change_nothing(
    trained: Trained, flags_of_parser: set[str], tmp_path: Path
) -> None:
    flags = []
    for flag in _flags(NO_EFFECT):
        if SECOND_NAMES.search(flag) or flag in ELSEWHERE:
            continue
        if flag in flags_of_parser:
            flags += [flag, *VALUES.get(flag, "").format(root=tmp_path).split()]
    assert len(flags) > 20
    more = " ".join(flags)
    saved = trained(f"{OURS} {SAVES} {more}".format(root=tmp_path))
    resumed = trained(f"{OURS} {LOADS} {more}".format(root=tmp_path))
    whole = trained(f"{OURS} ")
    assert _numbers(resumed, 3) == _numbers(whole, 3)
    for step in (1, 2):
        assert saved.values[step, "grad norm"] == whole.values[step, "grad norm"]


@pytest.fixture(scope="module")
def saved(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Roots with the checkpoint of a run under each wrapper, and the same published."""
    roots = {}
    for wrapper in (OURS, STOCK):
        root = tmp_path_factory.mktemp("saved")
        trained(f"{wrapper} {SAVES}".format(root=root))
        shutil.copytree(root / "a" / "iter_0000002", root / "published" / "release")
        (root / "published" / folders.TRACKER).write_text("release")
        roots[wrapper] = root
    return roots


@FULL
@pytest.mark.parametrize("name", LIKE_STOCK)
def test_a_load_is_that_of_stock(trained: Trained, saved: dict[str, Path], name: str) -> None:
    ours, stock = (
        trained(f"{wrapper} {LIKE_STOCK[name]}".format(root=saved[wrapper])).values
        for wrapper in (OURS, STOCK)
    )
    assert ours == stock
    assert (STEPS, "grad norm") in ours


@FULL
def test_without_a_checkpoint_the_run_ends(trained: Trained, tmp_path: Path) -> None:
    """With 0 until 0.19, as with stock."""
    flags = MISSING.format(root=tmp_path)
    status = train_status(trained, f"{STOCK} {flags}")
    done = trained(f"{OURS} {flags}", status)
    assert "--exit-on-missing-checkpoint" in done.log
    assert not done.values


def train_status(trained: Trained, flags: str) -> int:
    """The status of a run, whatever it is."""
    try:
        return trained(flags).status
    except AssertionError:
        return trained(flags, 1).status


@FULL
def test_states_that_are_not_saved_are_not_asked_for(
    trained: Trained, saved: dict[str, Path], tmp_path: Path
) -> None:
    trained(f"{OURS} {NOT_SAVED}".format(root=tmp_path))
    ours = trained(f"{OURS} {LOADS} {WITHOUT_STATES}".format(root=tmp_path)).values
    assert ours == trained(f"{OURS} {LOADS} {WITHOUT_STATES}".format(root=saved[OURS])).values
    log = trained(f"{OURS} {LOADS} --no-save-optim".format(root=tmp_path), 2).log
    assert "no_save_optim=True: " in log
    assert "Traceback" not in log


@FULL
@pytest.mark.parametrize("value", ["", "raise_all", "log_all"])
def test_a_dropped_layer_is_what_the_option_says(
    trained: Trained, saved: dict[str, Path], value: str
) -> None:
    option = f"--dist-ckpt-strictness {value}" if value else ""
    run = trained(
        f"{OURS} {DROPPED} {option}".format(root=saved[OURS]), 0 if value == "log_all" else 1
    )
    if value == "log_all":
        assert "belong to nothing that a rank has" in run.log
    else:
        assert "in the checkpoint but not in the state" in run.log
    assert "decoder.layers.1.mlp.linear_fc1.weight" in run.log


@FULL
def test_what_the_checkpoint_lacks_is_printed_if_that_is_allowed(
    trained: Trained, saved: dict[str, Path]
) -> None:
    log = trained(f"{OURS} {LENIENT}".format(root=saved[OURS])).log
    assert "keep their initial values" in log
    assert "q_layernorm.weight" in log


@FULL
def test_what_is_refused_is_one_error(
    trained: Trained, flags_of_parser: set[str], tmp_path: Path
) -> None:
    """All at once, before a process group exists."""
    asked = {flag: value for flag, value in ASKED.items() if flag in flags_of_parser}
    given = " ".join(f"{flag} {value}" for flag, value in asked.items())
    log = trained(f"{OURS} {given}".format(root=tmp_path), 2).log
    assert "Traceback" not in log
    assert log.count("cannot be used with this configuration") == 1
    options = {rule.option for rule in CHECKPOINT_RULES}
    for flag in asked:
        option = flag.removeprefix("--").replace("-", "_")
        assert option in options
        assert f"  - {option}=" in log, flag
