"""The parser that commands share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from .unknown import of_others, unknown

PROGRAM = "megatron-fsdp-adapter"
"""The console script of an installed package."""

USAGE = "%(prog)s (--preset NAME | --hf-config FILE | --config FILE | MODEL FLAGS) [OPTION ...]"
"""Usage of commands that take a model, of whose options there are too many for a line."""


class Parser(argparse.ArgumentParser):
    """A parser that says which command takes an unknown option, or suggests the one that it may
    mean."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.of_others: Mapping[str, Sequence[str]] = {}  # option -> the commands that take it
        # Option of a training run that the command does not model -> the reason, and what to do.
        self.not_modeled: Mapping[str, str] = {}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        given, rest = self.parse_known_args(args, namespace)
        if rest:
            name = rest[0].partition("=")[0]
            command = self.prog.split()[-1]
            if name in self.not_modeled:
                self.error(f"`{name}`: `{command}` does not model it: {self.not_modeled[name]}")
            if name in self.of_others:
                self.error(of_others(name, command, self.of_others[name]))
            kind = "option" if name.startswith("-") else "argument"
            self.error(unknown(kind, name, self._option_string_actions))
        return given


def bare_parser(command: str, description: str | None, **more: Any) -> Parser:
    """A parser without options. more: further arguments of `ArgumentParser`."""
    return Parser(
        prog=f"{PROGRAM} {command}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,
    )


def base_parser(command: str, description: str | None, **more: Any) -> Parser:
    """A parser with `--json`. more: further arguments of `ArgumentParser`."""
    parser = bare_parser(command, description, **more)
    parser.add_argument("--json", action="store_true", default=False, help="print it as JSON")
    return parser
