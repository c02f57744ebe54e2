"""What a resumed run takes from the checkpoint: the tables are complete, each kind of difference is
taken, kept or refused, and with another learning rate training goes on as stock DDP does when its
groups get that rate."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from megatron_fsdp_adapter.checkpoint import save_checkpoint, training_state
from megatron_fsdp_adapter.megatron.optimizer import group_options
from megatron_fsdp_adapter.megatron.optimizer.group_options import (
    APART,
    BOUND,
    CHECKPOINT,
    EQUAL,
    GROUP_OPTIONS,
    NEITHER,
    OVERRIDE,
    RUN,
    SCHEDULE_OPTIONS,
    USE_CHECKPOINT,
    Stored,
)
from tests.lib.gpt.checkpoints import loaded, saved
from tests.lib.gpt.fused_adam import transformer_engine_optimizer
from tests.lib.gpt.gpt import Trainer, build_trainer, init_megatron, train_step
from tests.lib.gpt.lion import LION, LION_IN_CORE
from tests.lib.gpt.one_layer import CASE, DEVICE, data
from tests.lib.gpt.precision_aware import precision_aware_trainer
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "megatron/optimizer/group_options.py",
    "megatron/optimizer/param_scheduler.py",
    "megatron/optimizer/optimizer.py",
)

pytestmark = pytest.mark.usefixtures("one_rank")

NAMES = {row.name: row.source for row in GROUP_OPTIONS}


# The tables have all that the installed core produces.


KINDS = ("adam", "adam without decoupling", "sgd", "muon", "lion", "fused")


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_a_parameter_group_is_in_the_table(kind: str) -> None:
    if kind == "lion" and not LION_IN_CORE:
        pytest.skip("this release has no optimizer 'lion'")
    if kind == "fused":
        trainer = precision_aware_trainer("optim_grads_params", {}, DEVICE)
    else:
        options: dict[str, Any] = {"optimizer": kind.split()[0]}
        if kind == "lion":
            options = dict(LION)
        if "without" in kind:
            options["decoupled_weight_decay"] = False
        trainer = build_trainer(CASE, "optim_grads_params", DEVICE, optimizer=options)
    train_step(trainer, data())
    found = {key for group in trainer.optimizer.param_groups for key in group}
    assert found - {"params"} <= set(NAMES)


def test_what_core_tells_groups_apart_by_is_compared() -> None:
    compared = {name for name, source in NAMES.items() if source in (APART, BOUND)}
    assert set(ParamGroupOverride.__annotations__) <= compared
    structural = {"is_expert_parallel", "is_decoupled_lr"}
    assert set(core_optimizer.param_group_identifier_keys) - structural <= compared
    assert {NAMES[name] for name in structural} == {RUN}


def test_every_value_of_the_schedule_is_in_the_table() -> None:
    _, scheduler = _trained("optim", 0.1)
    sources = {row.name: row.source for row in SCHEDULE_OPTIONS}
    kept = set(scheduler.state_dict())
    assert {name for name, source in sources.items() if source in (EQUAL, CHECKPOINT)} == kept
    given = set(inspect.signature(OptimizerParamScheduler).parameters)
    assert given - {"optimizer", OVERRIDE, USE_CHECKPOINT} == set(sources) - {"num_steps"}


# Each kind of difference.

COMMON = {"wd_mult": 1.0, "max_lr": 0.1, "min_lr": 0.01, "betas": (0.9, 0.9), "lr": 0.05}
VECTORS = {**COMMON, "wd_mult": 0.0}
FASTER = {**COMMON, "max_lr": 0.5}
EMBEDDING = {**COMMON, "max_lr": 0.7, "min_lr": 0.07}
NEW = 0.5
"""The rate of `FASTER`, as the config of a run has it."""
SMALLER = {**COMMON, "eps": 1e-6}
LARGER = {**COMMON, "eps": 1e-8}

Difference = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Resume:
    """A run's groups, and what the checkpoint has of the parameters of each: of the first parameter
    in the first entry, and so on.

    rate: the run's. taken: some options of the groups after the load. problems, remarks: words of
    one of them each.
    """

    groups: Difference
    saved: tuple[tuple[dict[str, Any], ...], ...]
    schedule: str = NEITHER
    rate: float = 0.1
    taken: tuple[Mapping[str, Any], ...] = ()
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in names}


RESUMES = {
    "the same": Resume((COMMON, VECTORS), ((COMMON,), (VECTORS,)), taken=(COMMON, VECTORS)),
    "other present values": Resume(
        ({**COMMON, "lr": 0.0, "step": 0},), (({**COMMON, "step": 7},),),
        taken=({"lr": 0.05, "step": 7},),
    ),
    "other betas": Resume(
        ({**COMMON, "betas": (0.9, 0.5)},), ((COMMON,),), taken=({"betas": (0.9, 0.9)},),
        remarks=("betas=(0.9, 0.9) of the checkpoint, not (0.9, 0.5) of this run, as with Meg",),
    ),
    "another rate": Resume(
        (FASTER,), ((COMMON,),), rate=NEW,
        problems=("max_lr=0.5 (--lr or an override): the checkpoint has 0.1 for p0.0, and no para"
                  "meter group like this run's. Use 0.1; or make the scheduler before the load,",),
    ),
    "another rate, override": Resume(
        (FASTER,), ((COMMON,),), OVERRIDE, NEW, taken=({"max_lr": 0.5, "lr": 0.05},),
        remarks=("max_lr=0.5 of this run, not 0.1 of the checkpoint, for p0.0",),
    ),
    "another rate, of the checkpoint": Resume(
        (FASTER, {**FASTER, "wd_mult": 0.0}, FASTER), ((COMMON,), (VECTORS,), ()),
        USE_CHECKPOINT, NEW, taken=({"max_lr": 0.1},) * 3,
        remarks=("max_lr=0.1 of the checkpoint, not 0.5 of this run (--use-checkpoint",),
    ),
    **{
        f"a new rate of its own {schedule}": Resume(
            (COMMON, EMBEDDING), ((COMMON,), (COMMON,)), schedule,
            problems=("max_lr=0.7 (--decoupled-lr or an override): the checkpoint has 0.1 for p1.0",
                      "min_lr=0.07 (--decoupled-min-lr or an override): the checkpoint has 0.01"),
        )
        for schedule in (NEITHER, OVERRIDE, USE_CHECKPOINT)
    },
    **{
        f"no rate of its own any more {schedule}": Resume(
            (COMMON,), ((COMMON, EMBEDDING),), schedule, taken=(COMMON,),
            remarks=("max_lr=0.1 of this run, not 0.7 of the checkpoint, for p0.1",
                     "min_lr=0.01 of this run, not 0.07 of the checkpoint, for p0.1"),
        )
        for schedule in (NEITHER, OVERRIDE, USE_CHECKPOINT)
    },
    "two rates where the checkpoint's is asked for": Resume(
        (FASTER,), ((COMMON, EMBEDDING),), USE_CHECKPOINT, NEW,
        problems=("max_lr=0.5 (--lr or an override): the checkpoint has 0.1 for p0.0",
                  "max_lr=0.5 (--lr or an override): the checkpoint has 0.7 for p0.1",
                  "min_lr=0.01 (--min-lr or an override): the checkpoint has 0.07"),
    ),
    "decay of other parameters": Resume(
        (COMMON, VECTORS), ((COMMON, VECTORS), (VECTORS,)), taken=(COMMON, VECTORS),
        remarks=("wd_mult=1.0 of this run, not 0.0 of the checkpoint, for p0.1",),
    ),
    "no group without decay before": Resume(
        (COMMON, VECTORS), ((COMMON,), (COMMON,)),
        problems=("wd_mult=0.0 (--apply-wd-to-qk-layernorm or an override): the checkpoint has",),
    ),
    "no decay of its own any more": Resume(
        (COMMON,), ((COMMON, {**COMMON, "start_wd": 0.3}),), taken=({"wd_mult": 1.0},),
        remarks=("start_wd=None of this run, not 0.3 of the checkpoint, for p0.1",),
    ),
    "another optimizer": Resume(
        ({**COMMON, "optimizer": "lion"},), ((COMMON,),),
        problems=("optimizer='lion' (--optimizer or an override): the checkpoint has None",),
    ),
    "another split": Resume(
        ({**COMMON, "is_expert_parallel": True},), (({**COMMON, "is_expert_parallel": False},),),
        taken=({"is_expert_parallel": True},),
    ),
    "groups of one value of eps": Resume(
        (SMALLER,), ((SMALLER, LARGER),),
        problems=("eps: the checkpoint has 1e-06 for p0.0 and 1e-08 for p0.1, which are one",),
    ),
    "a checkpoint without bounds in groups": Resume(
        (COMMON,), ((_without(COMMON, "max_lr", "min_lr"),),), taken=(COMMON,)
    ),
    "names of NeMo": Resume(
        (VECTORS,), (({**_without(VECTORS, "wd_mult"), "pre_wd_mult": 0.0},),), taken=(VECTORS,)
    ),
    "an option of an override": Resume(
        ({**COMMON, "mine": 2},), (({**COMMON, "mine": 1},),), taken=({"mine": 1},),
        remarks=("mine=1 of the checkpoint, not 2 of this run, as with Megatron's DDP, for p0.0",),
    ),
    "a group without parameters": Resume(
        (COMMON, VECTORS), ((COMMON,), ()), taken=(COMMON, VECTORS)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMES)
def test_a_difference_is_taken_kept_or_refused(name: str) -> None:
    case = RESUMES[name]
    stored = []
    for number, of_group in enumerate(case.saved):
        for index, options in enumerate(of_group):
            stored.append(Stored(number, options, (f"p{number}.{index}",)))
    groups = [{**options, "params": []} for options in case.groups]
    config = SimpleNamespace(lr=case.rate, min_lr=0.01, decoupled_lr=0.7, decoupled_min_lr=0.07)
    result = group_options.resumed(groups, stored, config, case.schedule)
    for found, wanted in ((result.problems, case.problems), (result.remarks, case.remarks)):
        assert len(found) == len(wanted), found
        for text, words in zip(found, wanted, strict=True):
            assert words in text
    for options, taken in zip(result.options, case.taken, strict=not case.problems):
        assert {key: options.get(key) for key in taken} == dict(taken)
        assert "params" not in options
        assert "pre_wd_mult" not in options


def test_parameters_of_equal_options_are_one_entry() -> None:
    names = {torch.zeros(1): str(number) for number in range(6)}
    meta = {name: {**COMMON, "lr": float(name)} for name in names.values()}
    [entry] = group_options.stored([{"params": list(names)}], names, meta)
    assert entry.names == ("0", "1", "2", "3")
    del meta["5"]
    with pytest.raises(ValueError, match="no options of a parameter group for 5"):
        group_options.stored([{"params": list(names)}], names, meta)


# Through the optimizer and core's scheduler.


def _trained(
    strategy: str | None, rate: float, schedule: str = NEITHER, **others: Any
) -> tuple[Trainer, OptimizerParamScheduler]:
    """A trainer, and core's scheduler over it with one flag or none; others: its values."""
    bounds = {"lr": rate, "min_lr": rate / 10}
    trainer = build_trainer(CASE, strategy, DEVICE, optimizer=bounds)
    values = {
        "init_lr": 0.0, "max_lr": rate, "min_lr": rate / 10,
        "lr_warmup_steps": 0, "lr_decay_steps": 10, "lr_decay_style": "linear",
        "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 10, "wd_incr_style": "constant",
    }  # fmt: skip
    flags = {name: name == schedule for name in (OVERRIDE, USE_CHECKPOINT)}
    return trainer, OptimizerParamScheduler(trainer.optimizer, **{**values, **others}, **flags)


def _steps(trainer: Trainer, scheduler: Any, first: int) -> list[tuple[float, float]]:
    found = []
    for number in (first, first + 1):
        found.append(train_step(trainer, data(number)))
        scheduler.step(1)
    return found


@dataclass(frozen=True)
class Schedule:
    """Whose rate a resumed run trains with."""

    flag: str
    taken: float = math.nan
    error: tuple[str, ...] = field(default=())


FLAGS = [
    Schedule(OVERRIDE, 0.05),
    Schedule(USE_CHECKPOINT, 0.01),
    Schedule(NEITHER, error=("max_lr=0.05", "--lr", "0.01", "--override-opt-param-scheduler")),
]


@pytest.mark.parametrize("case", FLAGS, ids=lambda case: case.flag or "neither")
def test_another_rate_on_a_resume_is_that_of_stock_groups_with_this_rate(
    case: Schedule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, scheduler = _trained("optim_grads_params", 0.01)
    _steps(first, scheduler, 0)
    saved(first, tmp_path, opt_param_scheduler=scheduler.state_dict())
    second, scheduler = _trained("optim_grads_params", 0.05, case.flag)
    before = scheduler.state_dict()
    if case.error:
        with pytest.raises(ValueError) as caught:
            loaded(second, tmp_path, opt_param_scheduler=before)
        for word in case.error:
            assert word in str(caught.value)
        return
    state = loaded(second, tmp_path, opt_param_scheduler=before)
    scheduler.load_state_dict(state["opt_param_scheduler"])
    assert "max_lr=" in capsys.readouterr().out

    stock, reference = _trained(None, 0.01)
    _steps(stock, reference, 0)
    for holder in (reference.__dict__, *stock.optimizer.param_groups):
        holder.update(max_lr=case.taken, min_lr=case.taken / 10)
    reference.step(0)
    found, wanted = _steps(second, scheduler, 2), _steps(stock, reference, 2)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)  # norms add up squares in another order
    rates = [[group["lr"] for group in run.optimizer.param_groups] for run in (second, stock)]
    assert rates[0] == rates[1]


CHANGED = {
    "lr_warmup_steps": (2, "--lr-warmup-iters"),
    "lr_decay_steps": (20, "--lr-decay-iters"),
    "lr_decay_style": ("cosine", "--lr-decay-style"),
    "end_wd": (0.2, "--end-weight-decay"),
    "wd_incr_steps": (20, "--train-iters"),
    "wd_incr_style": ("linear", "--weight-decay-incr-style"),
}


def test_other_values_of_the_schedule_are_one_error_or_follow_the_flags() -> None:
    others: dict[str, Any] = {name: value for name, (value, _) in CHANGED.items()}
    _, before = _trained("optim", 0.01)
    saved_state = before.state_dict()
    _, scheduler = _trained("optim", 0.01, **others)
    with pytest.raises(ValueError) as caught:
        scheduler.load_state_dict(saved_state)
    for name, (value, flag) in CHANGED.items():
        line = next(line for line in str(caught.value).splitlines() if f"- {name}=" in line)
        assert f"{name}={value!r}" in line
        assert flag in line
        assert repr(saved_state[name]) in line
    for flag, wanted in ((OVERRIDE, others), (USE_CHECKPOINT, saved_state)):
        _, scheduler = _trained("optim", 0.01, flag, **others)
        scheduler.load_state_dict(saved_state)
        assert {name: scheduler.state_dict()[name] for name in others} == {
            name: wanted[name] for name in others
        }


def test_schedules_of_other_wrappers_are_cores_own() -> None:
    _, before = _trained(None, 0.01)
    _, scheduler = _trained(None, 0.01, lr_decay_style="cosine")
    with pytest.raises(AssertionError, match="do not match"):
        scheduler.load_state_dict(before.state_dict())


def _save_with(trainer: Trainer, folder: Path, **options: Any) -> None:
    """Saves with other options of parameter groups; those that are None are left out."""
    state = training_state(trainer.chunks, trainer.optimizer)
    for own in state["optimizer"]["param_to_group_meta"].values():
        for name, value in options.items():
            own[name] = value
            if value is None:
                del own[name]
    save_checkpoint(str(folder), 1, state)


def test_options_that_only_one_side_has_are_read_and_decided_by_the_table(tmp_path: Path) -> None:
    """A release of torch or an override adds options. A checkpoint without them loads, and none of
    its own is passed over."""
    trainer, _ = _trained("optim_grads_params", 0.01)
    own = [dict(group) for group in trainer.optimizer.param_groups]
    _save_with(trainer, tmp_path, of_before=3, foreach=None)
    loaded(trainer, tmp_path)
    for group, before in zip(trainer.optimizer.param_groups, own, strict=True):
        assert group["of_before"] == 3
        assert group["foreach"] == before["foreach"]
    _save_with(trainer, tmp_path, start_wd=0.3)
    with pytest.raises(ValueError, match="start_wd=None .*the checkpoint has 0.3"):
        loaded(trainer, tmp_path)


def test_a_checkpoint_without_a_count_of_steps_does_not_begin_anew(tmp_path: Path) -> None:
    with transformer_engine_optimizer():
        trainer, _ = _trained("optim", 0.01)
        _save_with(trainer, tmp_path, step=None)
        with pytest.raises(ValueError, match=r"missing in the checkpoint(.|\n)*\.step"):
            loaded(trainer, tmp_path)


def _load_with(trainer: Trainer, part: str, rate: float) -> str:
    """Printed lines or the error of a load, in which parameters with `part` in their names had
    another rate."""
    state = training_state(trainer.chunks, trainer.optimizer)["optimizer"]
    meta = state["param_to_group_meta"]
    for name in [name for name in meta if part in name]:
        meta[name] = {**meta[name], "max_lr": rate}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            trainer.optimizer.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return printed.getvalue()


def _loads(rank: int, size: int) -> tuple[str, str]:
    trainer = build_trainer(CASE, "optim_grads_params", init_megatron())
    moved = _load_with(trainer, "word_embeddings" if rank else "nothing", 7.0)
    return moved, _load_with(trainer, "", 5.0 + rank)


def test_ranks_decide_alike_about_parameters_that_one_of_them_has() -> None:
    """As a pipeline stage has some. The others would go on, and wait in the next collective."""
    (moved, error), (unprinted, same_error) = run_ranks(_loads, 2)
    assert "not 7.0 of the checkpoint" in moved
    assert "word_embeddings.weight" in moved
    assert unprinted == ""
    assert error == same_error
    assert "the checkpoint has 5.0" in error
    assert "the checkpoint has 6.0" in error
