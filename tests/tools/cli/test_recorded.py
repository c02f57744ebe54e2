"""The record of the commands' parsers is up to date, and answers without torch."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from megatron_fsdp_adapter.__main__ import COMMANDS
from megatron_fsdp_adapter.tools.cli import recorded
from megatron_fsdp_adapter.tools.cli.parser import Parser

CHECKS = ("tools/cli/recorded.py", "tools/cli/parser.py")

UPDATE = "run python -m megatron_fsdp_adapter.tools.cli.recorded"


def test_the_record_is_up_to_date() -> None:
    assert recorded.FILE.read_text() == recorded.record_of_all(), UPDATE


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recorded_parser_says_what_the_command_does(command: str) -> None:
    module = importlib.import_module(f"megatron_fsdp_adapter.tools.cli.{command}")
    found = recorded.parser_of(command)
    assert found.format_help() == module.make_parser().format_help(), UPDATE


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["estimate", "--help"], 0, "--tensor-model-parallel-size"),
        (["plan", "--gpus", "x"], 2, "argument --gpus: invalid int value: 'x'"),
        (["estimate", "--optimizer", "sgd"], 2, "invalid choice: 'sgd'"),
        (["inspect", "folder", "--key"], 2, "Did you mean `--keys`?"),
        (["plan", "--rank", "0"], 2, "`--rank` is an option of `estimate`, not of `plan`. See"),
        (["estimate", "--gpus=8"], 2, "`--gpus` is an option of `plan`, not of `estimate`. See"),
        (["inspect", "a", "--preset", "x"], 2, "of `doctor` and `estimate` and `plan`, not of"),
        (["estimate", "--init-model-with-meta-device"], 2, "does not model it: the start of a"),
        (["convert", "a"], 2, "required: target, --to"),
    ],
)
def test_help_and_wrong_arguments_are_answered_without_torch(
    words: list[str], status: int, said: str
) -> None:
    program = (
        "import sys\n"
        "from megatron_fsdp_adapter.__main__ import main\n"
        "try:\n"
        f"    main({words})\n"
        "except SystemExit as end:\n"
        "    print('torch' in sys.modules, end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"False {status}", done.stderr
    assert said in done.stdout + done.stderr


def test_a_kind_of_option_without_a_record_is_an_error() -> None:
    parser = Parser()
    parser.add_argument("--version", action="version", version="1")
    with pytest.raises(TypeError, match="version: options of _VersionAction are not recorded"):
        recorded.recorded(parser)
