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
from megatron_fsdp_adapter.__main__ import COMMANDS, main

CHECKS = ("__main__.py", "tools/cli/output.py", "tools/cli/unknown.py")

ROOT = Path(__file__).parents[3]
SCRIPTS = (
    "prepare_data", "benchmark", "pretrain_gpt", "host_times", "fsdp2_times", "loss_curves",
    "megatron_times", "overview", "record", "elastic_times",
)  # fmt: skip
OTHERS = {
    "convert": ("a", "b", "--to", "torch_dist"),
    "diff": ("a", "b"),
    "inspect": ("a",),
    "plan": ("--gpus", "8"),
    "verify": ("a",),
}
"""What commands require."""
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
    found = []
    for action in parser._actions:
        if not (action.help or "").strip():
            found.append("/".join(action.option_strings) or action.dest)
    return found


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


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_an_error_with_a_suggestion(command: str, capsys: Captured) -> None:
    for option, remedy in (("--jsn=1", ". Did you mean `--json`?"), ("--nothing-like-it", "")):
        with pytest.raises(SystemExit, match="2"):
            main([command, *OTHERS.get(command, ()), option])
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.endswith(f"error: unknown option `{option.partition('=')[0]}`{remedy}")


def test_usage_and_version_go_to_stdout(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert main(["--help"]) == 0
    found = capsys.readouterr()
    assert found.out.startswith(f"megatron_fsdp_adapter {__version__}\nusage:")
    assert not found.err
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage:")
    for word, remedy in (("nothing", ""), ("estimat", ". Did you mean `estimate`?")):
        assert main([word]) == 2
        assert capsys.readouterr().err.startswith(f"unknown command `{word}`{remedy}\nusage:")
    assert main(["absent.py"]) == 2
    assert "no such script: absent.py" in capsys.readouterr().err
