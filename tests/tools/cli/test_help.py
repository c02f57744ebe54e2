"""What every command says of itself."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_adapter import __version__
from megatron_fsdp_adapter.__main__ import COMMANDS, REMOVED, main

ROOT = Path(__file__).parents[3]
SCRIPTS = ("prepare_data", "benchmark", "pretrain_gpt", "host_times", "loss_curves", "overview")
Captured = pytest.CaptureFixture[str]


class Parsed(Exception):
    """The parser that a command makes, in the place of its work."""


def parser_of(call: Callable[[], Any], patch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def stop(parser: argparse.ArgumentParser, *unused: Any, **named: Any) -> None:
        raise Parsed(parser)

    patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    with pytest.raises(Parsed) as caught:
        call()
    found = caught.value.args[0]
    assert isinstance(found, argparse.ArgumentParser)
    return found


def options_without_help(parser: argparse.ArgumentParser) -> list[str]:
    return [
        "/".join(action.option_strings) or action.dest
        for action in parser._actions if not (action.help or "").strip()
    ]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = parser_of(lambda: main([command]), monkeypatch)
    assert options_without_help(parser) == []
    text = parser.format_help()  # no stray percent sign in any of them
    assert text.startswith(f"usage: megatron-fsdp-adapter {command} ")
    assert re.search(r"^Exit status: 0", text, re.M), "exit codes are stated"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_of_a_script_has_help(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    run = importlib.import_module(script).main
    takes = run.__code__.co_argcount
    parser = parser_of(lambda: run([]) if takes else run(), monkeypatch)
    assert options_without_help(parser) == []
    assert parser.format_help()


@pytest.mark.parametrize("words", REMOVED)
def test_what_was_removed_is_refused_by_name(words: str, capsys: Captured) -> None:
    command, option = words.split()
    assert main([command, f"{option}=1"]) == 2
    assert capsys.readouterr().err == f"{command}: {option}=1: {REMOVED[words]}\n"


def test_usage_and_version_go_to_stdout(capsys: Captured) -> None:
    assert main(["--version"]) == 0 and main(["--help"]) == 0
    found = capsys.readouterr()
    assert found.out.startswith(f"megatron_fsdp_adapter {__version__}\nusage:") and not found.err
    for words in ([], ["nothing"]):
        assert main(words) == 2 and "usage:" in capsys.readouterr().err
    assert main(["absent.py"]) == 2 and "no such script: absent.py" in capsys.readouterr().err
