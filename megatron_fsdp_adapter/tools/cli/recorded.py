"""The parsers of all commands, recorded in `recorded.json`.

The options of a command come from tables of modules that import torch, which takes seconds. The
record answers `--help` and wrong arguments at once. After a change of an option, run

    python -m megatron_fsdp_adapter.tools.cli.recorded

Values that need more than a number or a choice are checked by the command itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .parser import Parser, bare_parser

FILE = Path(__file__).with_name("recorded.json")

_TYPES = {"int": int, "float": float}
_ACTIONS: Mapping[type, Any] = {
    argparse._StoreAction: "store",
    argparse._StoreTrueAction: "store_true",
    argparse._StoreFalseAction: "store_false",
    argparse._StoreConstAction: "store_const",
    argparse._AppendAction: "append",
    argparse.BooleanOptionalAction: "boolean",
}
"""Classes of actions -> their names in the record."""


def recorded(parser: Parser) -> dict[str, Any]:
    """A parser as plain values. TypeError for a kind of option that the record does not have."""
    groups = []
    for group in parser._action_groups:
        options = [_option(one) for one in group._group_actions if one.dest != "help"]
        groups.append({"title": group.title, "options": options})
    return {
        "description": parser.description,
        "usage": parser.usage,
        "argument_default": parser.argument_default,
        "not_modeled": parser.not_modeled,
        "groups": groups,
    }


def _option(action: argparse.Action) -> dict[str, Any]:
    """An option as the arguments of `add_argument`, without those that it leaves out."""
    kind = _ACTIONS.get(type(action))
    if kind is None:
        raise TypeError(f"{action.dest}: options of {type(action).__name__} are not recorded")
    named = list(action.option_strings) or [action.dest]
    if kind == "boolean":
        named = [name for name in named if not name.startswith("--no-")]
    found: dict[str, Any] = {"names": named, "action": kind, "help": action.help}
    if action.option_strings:
        found["dest"] = action.dest
    if "%(default)" in (action.help or ""):
        found["default"] = action.default
    if action.required and action.option_strings:
        found["required"] = True
    if kind == "store_const":
        found["const"] = action.const
    if kind in ("store", "append"):
        found["metavar"] = action.metavar
        found["nargs"] = action.nargs
        found["choices"] = None if action.choices is None else list(action.choices)
        kind_of_value = getattr(action.type, "__name__", None)
        if kind_of_value in _TYPES:
            found["type"] = kind_of_value
    return {name: value for name, value in found.items() if value is not None}


def parser_of(command: str) -> Parser:
    """The parser of a command, from the record."""
    records = json.loads(FILE.read_text())
    record = records[command]
    more: dict[str, Any] = {"usage": record["usage"]}
    if record["argument_default"] == argparse.SUPPRESS:
        more["argument_default"] = argparse.SUPPRESS  # which argparse knows by its identity
    parser = bare_parser(command, record["description"], **more)
    known = {group.title: group for group in parser._action_groups}
    for group in record["groups"]:
        where = known.get(group["title"]) or parser.add_argument_group(group["title"])
        for option in group["options"]:
            arguments = dict(option)
            names = arguments.pop("names")
            if arguments["action"] == "boolean":
                arguments["action"] = argparse.BooleanOptionalAction
            if "type" in arguments:
                arguments["type"] = _TYPES[arguments["type"]]
            if isinstance(arguments.get("metavar"), list):
                arguments["metavar"] = tuple(arguments["metavar"])
            where.add_argument(*names, **arguments)
    parser.of_others = _takers(records)
    parser.not_modeled = record["not_modeled"]
    return parser


def _takers(records: Mapping[str, Any]) -> dict[str, list[str]]:
    """Option -> the commands that take it."""
    found: dict[str, list[str]] = {}
    for command, record in records.items():
        for group in record["groups"]:
            for option in group["options"]:
                for name in option["names"]:
                    found.setdefault(name, []).append(command)
    return found


def check(command: str, argv: Sequence[str]) -> None:
    """Ends the process for `--help`, and for arguments that the command does not take."""
    parser_of(command).parse_args(argv)


def record_of_all() -> str:
    """The content of the record as it should be."""
    from megatron_fsdp_adapter.__main__ import COMMANDS

    found = {}
    for command in COMMANDS:
        module = importlib.import_module(f"{__package__}.{command}")
        found[command] = recorded(module.make_parser())
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(record_of_all())
    print(f"wrote {FILE}", file=sys.stderr)
