"""A row of the table of options: its field, flag, rules, and what it sets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...plan.unsharded_budget import AUTO
from .rules import Rule

DTYPES: Mapping[str, torch.dtype | None] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "auto": None,
}
"""Names of dtypes in Megatron-LM main's flags. "auto" means None."""
Dtype = torch.dtype | None
Gib = float | str
Text = str | None
Count = int | None

Test = Callable[[Any, Any], Any]
"""A function of a value and the config: truthy if the value is rejected."""
Fields = Callable[[Any], Mapping[str, Any]]
"""A function of a value: the fields of `EngineConfig` that it sets."""
Refusal = tuple[Test, str] | tuple[Test, str, str]


def _nothing(value: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Option:
    """A field of the DDP config.

    Attributes:
        name: of the field; the flag is `--name` with dashes.
        type, default: those of the field, and of the flag's value.
        help: text for `--help` and `docs/options.md`; empty: no flag is added.
        use: when to set it, for `docs/options.md`; empty: the page says that it has no effect. The
            page has no row for an option of core without `help`.
        plain: the corresponding argument of `fully_shard_model`.
        in_core: megatron-core 0.16.1 has the field, with this default.
        refused: rejections: a test of value and config, the reason with the remedy, and optionally
            `Rule.beside`.
        excludes: kind of CUDA graphs that excludes it -> reason.
        sets: the fields of `EngineConfig` that a value changes. If several options set one field,
            the last row counts.
        some_strategies: only some strategies support it, so `prove` switches it off when it loads
            under another one.
    """

    name: str
    type: Any
    default: Any
    help: str = ""
    use: str = ""
    plain: str = ""
    in_core: bool = False
    refused: tuple[Refusal, ...] = ()
    excludes: Mapping[str, str] | None = None
    sets: Fields = _nothing
    some_strategies: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def value(self, config: Any) -> Any:
        """The option's value, or its default if the config lacks it."""
        return getattr(config, self.name, self.default)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flag to a parser."""
        if self.type is bool:
            parser.add_argument(self.flag, action="store_true", help=self.help)
        else:
            readers: dict[Any, Any] = {Dtype: dtype_named, Gib: gib, Text: str, Count: int}
            read = readers.get(self.type, self.type)
            parser.add_argument(self.flag, type=read, default=self.default, help=self.help)

    def rules(self) -> list[Rule]:
        def rule(test: Test, *words: str) -> Rule:
            return Rule(self.name, lambda config: test(self.value(config), config), *words)

        return [rule(*refusal) for refusal in self.refused]


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a flag's value."""
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]


def gib(text: str) -> float | str:
    """A flag's number of GiB, or "auto"."""
    if text == AUTO:
        return AUTO
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: neither a number nor {AUTO!r}") from None
