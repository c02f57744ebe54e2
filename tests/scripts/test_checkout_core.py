"""`scripts/test.sh --core CHECKOUT` imports the megatron-core of a checkout of Megatron-LM, and
nothing else of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = ()  # of scripts/checkout_core.sh and scripts/test.sh

ROOT = Path(__file__).resolve().parents[2]
WORKS = sys.version_info >= (3, 12)
PRINTED = """
import importlib.util, sys
import megatron.core
print(megatron.core.__version__, importlib.util.find_spec("tests.lib") is not None)
"""
RUNS = """\
#!/usr/bin/env bash
# An interpreter that writes down what is imported by whom, in the place of lint, types and tests.
case "$*" in
  *pip*) exit ;;
  *ruff* | *mypy* | *"import sys, torch"*) exit ;;
  *pytest*) echo "$MEGATRON_LM_PATH|$("$REAL" -W ignore -c "$PRINTED")|$*" >> "$LOG" ;;
  *) exec "$REAL" "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a checkout has of Megatron-LM's packages."""
    for name, text in (("megatron/core", "__version__ = '99.0'\n"), ("tests", "")):
        folder = tmp_path / "Megatron-LM" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
    (tmp_path / "Megatron-LM" / "megatron" / "core" / "datasets").mkdir()
    return tmp_path / "Megatron-LM"


def _run(script: str, *words: str, **variables: str) -> tuple[int, str]:
    command = ["bash", str(ROOT / "scripts" / script), *words]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.skipif(not WORKS, reason="needs Python 3.12 or newer, as megatron-core 0.19 does")
def test_the_checkouts_core_is_imported_and_its_tests_are_not(
    tmp_path: Path, checkout: Path
) -> None:
    interpreter = tmp_path / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.write_text(RUNS)
    interpreter.chmod(0o755)
    log = tmp_path / "log"
    status, messages = _run(
        "test.sh", "--full", "--core", str(checkout), "-x", "FILE",
        VENV=str(tmp_path), PYTHON=sys.executable, REAL=sys.executable, LOG=str(log),
        PRINTED=PRINTED, PYTHONPATH="",
    )  # fmt: skip
    assert status == 0, messages
    assert log.read_text() == f"{checkout}|99.0 True|-m pytest --full -x FILE\n"


@pytest.mark.parametrize("wrong", ("no folder", "no core", "older Python"))
def test_what_cannot_be_used_is_one_error(wrong: str, tmp_path: Path, checkout: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{{}}"\n')
    python.chmod(0o755)
    named = {"no folder": tmp_path / "none", "no core": tmp_path}.get(wrong, checkout)
    if wrong == "older Python":
        python.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1 ;; *) echo 3.11 ;; esac\n')
    status, messages = _run("checkout_core.sh", str(named), str(tmp_path / "made"), str(python))
    assert status == 2
    assert messages.startswith(f"--core {named}: ")
    remedy = "set PYTHON" if wrong == "older Python" else "Name a checkout of Megatron-LM"
    assert remedy in messages
    assert not (tmp_path / "made").exists()
