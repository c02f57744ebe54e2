"""Rules about options, and the configs that rules read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


class Joined:
    """Several configs as one, like Megatron-LM's arguments: an option is read from the first config
    that has it."""

    def __init__(self, *configs: Any) -> None:
        self._configs = configs

    def __getattr__(self, option: str) -> Any:
        for config in self._configs:
            if hasattr(config, option):
                return getattr(config, option)
        raise AttributeError(option)


@dataclass(frozen=True)
class Rule:
    """Rejected values of an option.

    Attributes:
        option: its name; a dotted path in a recipe of Megatron-Bridge.
        broken: a function of a config: truthy if the config is rejected.
        message: the reason and the remedy.
        beside: description of other options involved, a format string: `{0.name}` is the value of
            the config's field `name`.
    """

    option: str
    broken: Callable[[Any], Any]
    message: str
    beside: str = ""

    def problem(self, config: Any) -> str:
        """`option=value with ...: reason`."""
        value = config
        for name in self.option.split("."):
            value = getattr(value, name, None)
        beside = f" with {self.beside.format(config)}" if self.beside else ""
        return f"{self.option}={value!r}{beside}: {self.message}"


Rules = tuple[Rule, ...]


def problems(config: Any, rules: Iterable[Rule]) -> list[str]:
    """One line for each broken rule: option, value, reason and remedy."""
    return [rule.problem(config) for rule in rules if rule.broken(config)]


def is_on(config: Any, option: str) -> bool:
    """True if `option` exists and is set."""
    return bool(getattr(config, option, False))


def above_one(config: Any, option: str) -> bool:
    """True if `option`, a number of ranks, is larger than 1."""
    return (getattr(config, option, None) or 1) > 1


def off(option: str, message: str, beside: str = "") -> Rule:
    """A rule: `option` must not be on."""
    return Rule(option, lambda config: is_on(config, option), message, beside)


def unset(option: str, message: str) -> Rule:
    """A rule: `option` must be None."""
    return Rule(option, lambda config: getattr(config, option, None) is not None, message)


def within(when: Callable[[Any], bool], beside: str, *rules: Rule) -> Rules:
    """The rules, restricted to configs for which `when` is true. `beside` describes these configs,
    where a rule has no description of its own."""

    def restricted(rule: Rule) -> Rule:
        def broken(config: Any) -> Any:
            return when(config) and rule.broken(config)

        return Rule(rule.option, broken, rule.message, rule.beside or beside)

    return tuple(map(restricted, rules))
