"""Options of parameter groups and of the schedule: which of them a resumed run takes from the
checkpoint, and which are its own.

`GROUP_OPTIONS` and `SCHEDULE_OPTIONS` list them; docs/options.md is made of these tables. The
reference is Megatron's DDP of core 0.19. It looks for a saved group that agrees with a group of the
run in the options that tell groups apart, and takes all other options of that group. If there is no
such group, it stops with a KeyError that contains values without names.

Here parameters have names, so a parameter that comes into another group is printed, and the error
names options, values and parameters. Two things differ from that reference on purpose:

- The bounds of the learning rate follow the scheduler's two flags. Megatron's DDP stops if they
  change, with any flag. Megatron-LM's main branch does as here, after a load of `fsdp_dtensor`.
- Core before 0.19 does not tell groups apart by these bounds. It takes those of the last saved
  group without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...optim.state import COUNT, GroupOptions

# Where the value of an option comes from.
RUN = "run"
CHECKPOINT = "checkpoint"
APART = "apart"
"""Tells groups apart: the run's, if the checkpoint has a group with these values."""
BOUND = "bound"
"""As `APART`, but the scheduler's flags decide where the value is that of the whole schedule."""
EQUAL = "equal"
"""A value of the scheduler: both must be equal, unless one of its flags is set."""

# Arguments of core's scheduler that say whose schedule a resumed run has.
OVERRIDE = "override_opt_param_scheduler"
USE_CHECKPOINT = "use_checkpoint_opt_param_scheduler"
NEITHER = ""

FLAGS = {
    OVERRIDE: "--override-opt-param-scheduler",
    USE_CHECKPOINT: "--use-checkpoint-opt_param-scheduler",
}
"""Flags of Megatron-LM that set these arguments."""


@dataclass(frozen=True)
class Origin:
    """The origin of an option of a parameter group, or of a value of the scheduler.

    Attributes:
        name: its key.
        source: the origin of its value in a resumed run.
        flags: the flags of Megatron-LM that set it. The first one sets it for all groups.
        meaning: its effect, for docs.
    """

    name: str
    source: str
    flags: tuple[str, ...]
    meaning: str


GROUP_OPTIONS = (
    Origin("max_lr", BOUND, ("--lr", "--decoupled-lr"), "the learning rate after the warmup"),
    Origin("min_lr", BOUND, ("--min-lr", "--decoupled-min-lr"), "the learning rate at the end"),
    Origin(
        "wd_mult", APART, ("--apply-wd-to-qk-layernorm",), "factor of weight decay, 0 for vectors"
    ),
    Origin("start_wd", APART, (), "weight decay at the beginning, if an override sets it"),
    Origin("end_wd", APART, (), "weight decay at the end, likewise"),
    Origin("optimizer", APART, ("--optimizer",), "`muon` or `lion`; Adam has no mark"),
    Origin("lr_mult", APART, (), "written by core, without effect"),
    Origin("is_decoupled_lr", RUN, (), "written by core, always False since 0.16"),
    Origin("default_config", RUN, (), "the group's learning rate is the one that is logged"),
    Origin("is_expert_parallel", RUN, (), "experts, if they are split over ranks"),
    Origin("foreach", RUN, (), "torch: how a step is computed"),
    Origin("fused", RUN, (), "torch: how a step is computed"),
    Origin("capturable", RUN, (), "torch: a step may be captured in a graph"),
    Origin("differentiable", RUN, (), "torch: gradients pass through a step"),
    Origin("lr", CHECKPOINT, (), "the present learning rate. The scheduler sets it again"),
    Origin("weight_decay", CHECKPOINT, (), "the present weight decay. The scheduler sets it again"),
    Origin(COUNT, CHECKPOINT, (), "number of steps, if the optimizer is fused"),
    Origin("betas", CHECKPOINT, ("--adam-beta1", "--adam-beta2"), "factors of the moving averages"),
    Origin("eps", CHECKPOINT, ("--adam-eps",), "Adam's summand of the divisor"),
    Origin("bias_correction", CHECKPOINT, (), "Adam's correction of the first steps"),
    Origin("decoupled_weight_decay", CHECKPOINT, (), "torch: AdamW's weight decay, not Adam's"),
    Origin("amsgrad", CHECKPOINT, (), "torch: Adam's largest second moment divides"),
    Origin("maximize", CHECKPOINT, (), "torch: steps go uphill"),
    Origin("momentum", CHECKPOINT, ("--sgd-momentum",), "momentum of SGD"),
    Origin("dampening", CHECKPOINT, (), "dampening of SGD's momentum"),
    Origin("nesterov", CHECKPOINT, (), "SGD's momentum is Nesterov's"),
)
"""Options of parameter groups. Others, which overrides may add, are the checkpoint's."""

SCHEDULE_OPTIONS = (
    Origin("max_lr", EQUAL, ("--lr",), "the learning rate after the warmup"),
    Origin("min_lr", EQUAL, ("--min-lr",), "the learning rate at the end"),
    Origin(
        "lr_warmup_steps",
        EQUAL,
        ("--lr-warmup-iters", "--lr-warmup-fraction", "--global-batch-size"),
        "length of the warmup, in samples",
    ),
    Origin(
        "lr_decay_steps",
        EQUAL,
        ("--lr-decay-iters", "--train-iters", "--global-batch-size"),
        "length of the decay, in samples",
    ),
    Origin("lr_decay_style", EQUAL, ("--lr-decay-style",), "form of the decay"),
    Origin(
        "start_wd",
        EQUAL,
        ("--weight-decay", "--start-weight-decay"),
        "weight decay at the beginning",
    ),
    Origin("end_wd", EQUAL, ("--weight-decay", "--end-weight-decay"), "weight decay at the end"),
    Origin(
        "wd_incr_steps",
        EQUAL,
        ("--train-iters", "--global-batch-size"),
        "length of the increase of weight decay, in samples",
    ),
    Origin("wd_incr_style", EQUAL, ("--weight-decay-incr-style",), "form of the increase"),
    Origin("num_steps", CHECKPOINT, (), "samples until now"),
    Origin("init_lr", RUN, ("--lr-warmup-init",), "the learning rate before the warmup. Not saved"),
    Origin(
        "wsd_decay_steps",
        RUN,
        ("--lr-wsd-decay-iters",),
        "length of WSD's decay, in samples. Not saved",
    ),
    Origin("lr_wsd_decay_style", RUN, ("--lr-wsd-decay-style",), "form of WSD's decay. Not saved"),
)
"""Values of core's `OptimizerParamScheduler`."""

_BY_NAME = {row.name: row for row in GROUP_OPTIONS}
_TELL_APART = tuple(row for row in GROUP_OPTIONS if row.source in (APART, BOUND))
_BOUNDS = tuple(row for row in GROUP_OPTIONS if row.source == BOUND)
_PRESENT = frozenset({"lr", "weight_decay", COUNT})
"""Options that change while a run trains."""
_ABSENT = {"wd_mult": 1.0, "lr_mult": 1.0}
"""Values that core uses for options which a group does not have. For others it is None."""
_FIELDS = {"--lr": "lr", "--min-lr": "min_lr"}
"""Fields of the optimizer config from which core sets the bounds of all groups."""
_SHOWN = 3
"""Number of parameters that a message names."""
_OLDER = "pre_"
"""Prefix of `wd_mult` and `lr_mult` in checkpoints of NeMo."""


@dataclass(frozen=True)
class Stored:
    """Options that some parameters of one of the run's groups have in the checkpoint.

    group: the number of the group in the run. names: the first of these parameters.
    """

    group: int
    options: GroupOptions
    names: tuple[str, ...]


Line = tuple[str, tuple[str, ...]]
"""A text about parameters, with `{names}` in the place of their names; and these names."""


@dataclass
class Resumed:
    """The result of a load: the options of each group, and texts about changes.

    problems: reasons why the checkpoint is refused. remarks: values that are not the same in the
    run and in the checkpoint, and which of them is taken.
    """

    options: list[GroupOptions] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def source_of(name: str) -> str:
    """The origin of a group's option. Options that core does not know are the checkpoint's."""
    row = _BY_NAME.get(name.removeprefix(_OLDER))
    return CHECKPOINT if row is None else row.source


def stored(
    groups: Sequence[GroupOptions],
    names: Mapping[torch.Tensor, str],
    meta: Mapping[str, Mapping[str, Any]],
) -> list[Stored]:
    """Options that a rank's parameters have in a checkpoint, once for all parameters with the same.

    names: of the parameters. meta: options by name. ValueError if it lacks a parameter."""
    found: list[Stored] = []
    for number, group in enumerate(groups):
        for param in group["params"]:
            name = names[param]
            if name not in meta:
                raise ValueError(f"the checkpoint has no options of a parameter group for {name}")
            found.append(Stored(number, _without_tensors(meta[name]), (name,)))
    return merged(found)


def merged(parts: Iterable[Stored]) -> list[Stored]:
    """`parts`, joined where group and options are the same, in order of first appearance."""
    result: list[Stored] = []
    for part in parts:
        for number, known in enumerate(result):
            if known.group == part.group and _lasting(known) == _lasting(part):
                names = tuple(dict.fromkeys((*known.names, *part.names)))
                result[number] = replace(known, names=names[: _SHOWN + 1])
                break
        else:
            result.append(part)
    return result


def resumed(
    groups: Sequence[GroupOptions], stored: Sequence[Stored], config: Any, schedule: str
) -> Resumed:
    """The options of the run's `groups` after a load; see the tables.

    stored: of all ranks; the result is the same on each. config: the optimizer's. schedule:
    `OVERRIDE`, `USE_CHECKPOINT` or `NEITHER`."""
    wanted = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    remarks = _take_bounds(wanted, stored, config) if schedule == USE_CHECKPOINT else []
    problems: list[Line] = []
    chosen = []
    for number, options in enumerate(wanted):
        own = [part for part in stored if part.group == number]
        free = [row for row in _BOUNDS if schedule == OVERRIDE and _follows(options, row, config)]
        rows = [row for row in _TELL_APART if row not in free]
        alike = [part for part in (*own, *stored) if _are_alike(part.options, options, rows)]
        if alike:
            remarks += _changes(own, options)
            remarks += _kept(own, alike[0], options)
            problems += _several(own, alike[0], rows)
            options = {**options, **_of_checkpoint(alike[0].options)}
        elif own:
            problems += _unknown(own, options, rows, config, schedule)
        chosen.append(options)
    return Resumed(chosen, _texts(problems), _texts(remarks))


def differences(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Problems with a scheduler of which neither flag is set: its values that are not `saved`."""
    return [
        f"{row.name}={wanted[row.name]!r} ({', '.join(row.flags)}): the checkpoint has "
        f"{saved[row.name]!r}. Use that; or set {OVERRIDE} ({FLAGS[OVERRIDE]}) to take "
        f"this run's schedule, or {USE_CHECKPOINT} ({FLAGS[USE_CHECKPOINT]}) to take the "
        "checkpoint's"
        for row in _unequal(wanted, saved)
    ]


def schedule_remarks(
    wanted: Mapping[str, Any], saved: Mapping[str, Any], schedule: str
) -> list[str]:
    """Values of a scheduler that are not `saved`, each with the one that is taken. schedule:
    `OVERRIDE` or `USE_CHECKPOINT`."""
    found = []
    for row in _unequal(wanted, saved):
        own, old = wanted[row.name], saved[row.name]
        if schedule == OVERRIDE:
            text = f"{row.name}={own!r} of this run, not {old!r} of the checkpoint"
        else:
            text = f"{row.name}={old!r} of the checkpoint, not {own!r} of this run"
        found.append(f"{text} ({FLAGS[schedule]})")
    return found


# Comparisons.


def _unequal(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[Origin]:
    """The rows of a scheduler's values that may not change without a flag, and have changed."""
    for row in SCHEDULE_OPTIONS:
        is_there = row.name in wanted and row.name in saved
        if row.source == EQUAL and is_there and wanted[row.name] != saved[row.name]:
            yield row


def _value(options: GroupOptions, row: Origin) -> Any:
    older = options.get(_OLDER + row.name, _ABSENT.get(row.name))
    return options.get(row.name, older)


def _are_alike(saved: GroupOptions, options: GroupOptions, rows: Iterable[Origin]) -> bool:
    """True if `rows` have the same values. Bounds are not compared where the checkpoint has none: a
    group without them follows the schedule."""
    compared = (row for row in rows if row.source != BOUND or row.name in saved)
    return all(_value(saved, row) == _value(options, row) for row in compared)


def _follows(options: GroupOptions, row: Origin, config: Any) -> bool:
    """True if a group's bound is that of the whole schedule, and not one of its own."""
    return bool(options.get(row.name) == getattr(config, _FIELDS[row.flags[0]]))


def _lasting(part: Stored) -> GroupOptions:
    return {key: value for key, value in part.options.items() if key not in _PRESENT}


def _of_checkpoint(saved: GroupOptions) -> GroupOptions:
    return {key: value for key, value in saved.items() if source_of(key) == CHECKPOINT}


def _without_tensors(options: Mapping[str, Any]) -> GroupOptions:
    """A copy that other ranks can read: numbers in the place of tensors, tuples of lists."""
    result: GroupOptions = {}
    for key, value in options.items():
        if isinstance(value, torch.Tensor):
            value = value.item()
        result[key] = tuple(value) if isinstance(value, list) else value
    return result


# What is done about differences.


def _take_bounds(
    wanted: Sequence[GroupOptions], stored: Sequence[Stored], config: Any
) -> list[Line]:
    """Sets bounds of the schedule to those of the checkpoint, if its groups agree in them; returns
    remarks. Where the checkpoint has groups like all of the run's, nothing is changed."""
    if all(
        any(_are_alike(part.options, wanted[own.group], _TELL_APART) for part in stored)
        for own in stored
    ):
        return []
    remarks: list[Line] = []
    for row in _BOUNDS:
        following = [_follows(options, row, config) for options in wanted]
        saved = {
            part.options[row.name]
            for part in stored
            if following[part.group] and row.name in part.options
        }
        if len(saved) != 1:
            continue
        [old] = saved
        for options, follows in zip(wanted, following, strict=True):
            if follows and options[row.name] != old:
                text = f"{row.name}={old!r} of the checkpoint, not {options[row.name]!r}"
                remarks.append((f"{text} of this run ({FLAGS[USE_CHECKPOINT]})", ()))
                options[row.name] = old
    return remarks


def _changes(own: Sequence[Stored], options: GroupOptions) -> Iterator[Line]:
    """A line for each option in which parameters come into another group, or their group has got
    another value."""
    for row in _TELL_APART:
        value = _value(options, row)
        for part in own:
            old = _value(part.options, row)
            if old != value and (row.source != BOUND or row.name in part.options):
                text = f"{row.name}={value!r} of this run, not {old!r} of the checkpoint"
                yield f"{text}, for {{names}}", part.names


def _kept(own: Sequence[Stored], taken: Stored, options: GroupOptions) -> Iterator[Line]:
    """A line for each option of the checkpoint that the run has set to another value."""
    given = _without_tensors(options)
    for name, old in _of_checkpoint(taken.options).items():
        if name in _PRESENT or name not in given or given[name] == old:
            continue
        text = f"{name}={old!r} of the checkpoint, not {given[name]!r} of this run"
        for part in own:
            yield f"{text}, as with Megatron's DDP, for {{names}}", part.names


def _several(own: Sequence[Stored], taken: Stored, rows: Sequence[Origin]) -> Iterator[Line]:
    """A problem for each option that has several values in the checkpoint but one in the run:
    nothing says which value the group gets."""
    for part in own:
        if not _are_alike(part.options, taken.options, rows):
            continue
        for name, value in _of_checkpoint(taken.options).items():
            other = part.options.get(name, value)
            if name not in _PRESENT and other != value:
                yield (
                    f"{name}: the checkpoint has {value!r} for {taken.names[0]} and {other!r} for "
                    "{names}, which are one parameter group in this run. Make the groups as they "
                    "were saved, or leave out the optimizer's state (--no-load-optim)",
                    part.names,
                )


def _unknown(
    own: Sequence[Stored],
    options: GroupOptions,
    rows: Sequence[Origin],
    config: Any,
    schedule: str,
) -> Iterator[Line]:
    """A problem for each option of a group of which the checkpoint has none like it."""
    for row in rows:
        value = _value(options, row)
        follows = row.source == BOUND and _follows(options, row, config)
        for part in own:
            if _are_alike(part.options, options, [row]):
                continue
            old = _value(part.options, row)
            if follows and schedule == NEITHER:
                remedy = (
                    f"make the scheduler before the load, with {OVERRIDE}=True "
                    f"({FLAGS[OVERRIDE]}) to take {value!r}, or with {USE_CHECKPOINT}=True "
                    f"({FLAGS[USE_CHECKPOINT]}) to take {old!r}"
                )
            else:
                remedy = "leave out the optimizer's state (--no-load-optim)"
            yield (
                f"{row.name}={value!r} ({_setters(row, value, config)}): the checkpoint has "
                f"{old!r} for {{names}}, and no parameter group like this run's. Use {old!r}; or "
                f"{remedy}",
                part.names,
            )


def _setters(row: Origin, value: Any, config: Any) -> str:
    """The flags that may have set an option to `value`."""
    setters = list(row.flags)
    if row.source == BOUND:
        by_config = (getattr(config, flag[2:].replace("-", "_"), None) for flag in row.flags)
        given = zip(row.flags, by_config, strict=True)
        setters = [flag for flag, wanted in given if wanted == value][:1]
    return " or ".join((*setters, "an override"))


def _texts(lines: Iterable[Line]) -> list[str]:
    """The lines with names, one for each text."""
    names_of: dict[str, tuple[str, ...]] = {}
    for text, names in lines:
        names_of[text] = tuple(dict.fromkeys((*names_of.get(text, ()), *names)))
    texts = []
    for text, names in names_of.items():
        more = " and others" if len(names) > _SHOWN else ""
        texts.append(text.replace("{names}", ", ".join(names[:_SHOWN]) + more))
    return texts
