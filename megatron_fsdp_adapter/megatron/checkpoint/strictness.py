"""State that only one side has, a checkpoint or the model, by Megatron's `--dist-ckpt-strictness`.

Megatron applies the option to `torch_dist` alone. It calls keys that a rank asks for and the
checkpoint lacks "unexpected", and keys that the checkpoint has and no rank asks for "missing". Here
and in errors they are "missing" and "unexpected", as in torch.

- Missing keys are an error unless `strict_fsdp_dtensor_load` is off, the option of this format.
- Unexpected keys are compared over all ranks, because each rank has its own stage and experts.
  State that a run leaves out as a whole is not compared: the optimizer's under `--finetune` or
  `--no-load-optim`, random generators, arguments. Neither are records of FP8, which are optional.

Without the option `torch_dist` refuses a model with fewer layers, since it stores a stack of layers
as one tensor, and says nothing of other unexpected keys. Here a layer that no rank has is an error,
and other keys are printed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from ...checkpoint.state import Mismatch
from ...checkpoint.training import OPTIMIZER
from ...state.names import MODEL

OPTION = "dist_ckpt_strictness"
LENIENT = "strict_fsdp_dtensor_load"


class Action(Enum):
    """The answer to keys that only one side has."""

    RAISE = auto()
    RAISE_FOR_LAYERS = auto()  # prints keys that belong to no dropped layer
    PRINT = auto()
    IGNORE = auto()


@dataclass(frozen=True)
class Strictness:
    """The answers of one value of the option.

    missing: for keys that the checkpoint lacks, where `strict_fsdp_dtensor_load` is off;
    unexpected: for keys of the checkpoint that no rank has."""

    missing: Action
    unexpected: Action


_DEFAULT = Strictness(Action.PRINT, Action.RAISE_FOR_LAYERS)
STRICTNESS: Mapping[str, Strictness] = {
    "assume_ok_unexpected": _DEFAULT,
    "log_unexpected": _DEFAULT,
    "raise_unexpected": Strictness(Action.RAISE, Action.RAISE_FOR_LAYERS),
    "log_all": Strictness(Action.PRINT, Action.PRINT),
    "raise_all": Strictness(Action.RAISE, Action.RAISE),
    "ignore_all": Strictness(Action.IGNORE, Action.IGNORE),
}
"""Megatron's values. The two that return keys are refused (`options/checkpoint_flags.py`)."""

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def strictness_of(value: str | None) -> Strictness:
    """The answers for a value of the option, None if the caller has no such option. ValueError for
    an unknown one."""
    if value is None:
        return _DEFAULT
    if value not in STRICTNESS:
        raise ValueError(f"{OPTION}={value!r}: use one of {list(STRICTNESS)}")
    return STRICTNESS[value]


def unexpected_keys(
    stored: Iterable[str], asked: Collection[str], optional: tuple[str, ...]
) -> tuple[str, ...]:
    """The stored keys that are not among `asked`, those of all ranks.

    Only model and optimizer are looked at, and each only if ranks ask for a part of it. optional:
    ends of keys that may be left out."""
    parts = tuple(
        f"{part}."
        for part in (MODEL, OPTIMIZER)
        if any(key.startswith(f"{part}.") for key in asked)
    )
    found = []
    for key in stored:
        if key.startswith(parts) and key not in asked and not key.endswith(optional):
            found.append(key)
    return tuple(found)


def dropped_layers(unexpected: Iterable[str], asked: Iterable[str]) -> tuple[str, ...]:
    """The unexpected keys of modules in a list (layers, experts) of which the model has others."""
    numbers: dict[str, set[str]] = {}
    for key in asked:
        for modules, number in _places(key):
            numbers.setdefault(modules, set()).add(number)
    dropped = []
    for key in unexpected:
        is_dropped = any(
            modules in numbers and number not in numbers[modules]
            for modules, number in _places(key)
        )
        if is_dropped and key.startswith(f"{MODEL}."):
            dropped.append(key)
    return tuple(dropped)


def _places(key: str) -> Iterator[tuple[str, str]]:
    """(path of a list of modules, number in it) for each number in a key."""
    for match in _NUMBER.finditer(key):
        yield key[: match.start()], match[1]


def refused(found: Mismatch, asked: Iterable[str], is_strict: bool, by: Strictness) -> Mismatch:
    """The part of a mismatch that is an error. is_strict: `strict_fsdp_dtensor_load`."""
    missing: tuple[str, ...] = ()
    if is_strict or by.missing is Action.RAISE:
        missing = found.missing
    unexpected: tuple[str, ...] = ()
    if by.unexpected is Action.RAISE:
        unexpected = found.unexpected
    elif by.unexpected is Action.RAISE_FOR_LAYERS:
        unexpected = dropped_layers(found.unexpected, asked)
    return Mismatch(missing=missing, unexpected=unexpected, different=found.different)


def advice(found: Mismatch) -> Iterator[str]:
    """A remedy for each kind of refused keys."""
    if found.missing:
        yield f"Set {LENIENT}=False to keep initial values of what the checkpoint lacks."
    if found.unexpected:
        yield f"Set {OPTION}='log_all' to load the rest without what no rank has."


def printed(found: Mismatch, folder: object, by: Strictness) -> Iterator[str]:
    """Lines about keys that are no error."""
    if found.missing and by.missing is Action.PRINT:
        yield (
            f"{len(found.missing)} keys are not in {folder} and keep their initial values, because "
            f"{LENIENT} is off: {', '.join(sorted(found.missing))}"
        )
    if found.unexpected and by.unexpected is not Action.IGNORE:
        weights = [key for key in found.unexpected if key.startswith(f"{MODEL}.")]
        others = len(found.unexpected) - len(weights)
        listed = sorted(weights)
        if others:
            listed.append(f"{others} of the optimizer's state")
        yield (
            f"{len(found.unexpected)} keys of {folder} belong to nothing that a rank has, and are "
            f"not loaded: {', '.join(listed)}"
        )
