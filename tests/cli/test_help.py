"""What every command says of itself."""

from __future__ import annotations

import argparse
import importlib
import io
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_adapter import __version__
from megatron_fsdp_adapter.__main__ import COMMANDS, REMOVED, main
from megatron_fsdp_adapter.diagnostics import progress

ROOT = Path(__file__).parents[2]
SCRIPTS = ("prepare_data", "benchmark", "pretrain_gpt", "host_times", "loss_curves")
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


def hidden_defaults(parser: argparse.ArgumentParser) -> list[str]:
    """Options with a value whose help names no default."""
    return [
        action.option_strings[0] for action in parser._actions
        if action.option_strings and action.nargs != 0 and not action.required
        and not re.search(r"default|again", action.help or "")
        and action.dest not in ("preset", "hf_config", "config", *REQUIRED)
    ]  # fmt: skip


REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""Options of a model that are given there or in a file."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = parser_of(lambda: main([command]), monkeypatch)
    assert options_without_help(parser) == []
    assert hidden_defaults(parser) == []
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


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_progress_bar_is_for_terminals(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with progress.progress_bar("verify") as advance:
        for _ in range(4):
            time.sleep(0.15)  # tqdm redraws ten times a second
            advance(2**20, 2**22)
    text = stream.getvalue()
    assert ("verify" in text and "/4.00M" in text) if is_terminal else not text
    assert capsys.readouterr().out == ""


def test_usage_and_version_go_to_stdout(capsys: Captured) -> None:
    assert main(["--version"]) == 0 and main(["--help"]) == 0
    found = capsys.readouterr()
    assert found.out.startswith(f"megatron_fsdp_adapter {__version__}\nusage:") and not found.err
    for words in ([], ["nothing"]):
        assert main(words) == 2 and "usage:" in capsys.readouterr().err
    assert main(["absent.py"]) == 2 and "no such script: absent.py" in capsys.readouterr().err
