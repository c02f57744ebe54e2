"""`scripts/setup_env.sh` installs the newest torch that the tests run with and pip may have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = ()  # of scripts/setup_env.sh

ROOT = Path(__file__).resolve().parents[2]
KIND = "newer" if sys.version_info >= (3, 12) else "older"
INTERPRETER = """\
#!/usr/bin/env bash
# An interpreter whose pip writes down what it is to install, and refuses what it may not have.
if [ "$1 $2 $3" = "-m pip config" ]; then echo "global.constraint='/etc/limits.txt'"; exit; fi
[ "$1 $2" = "-m pip" ] || exec "$REAL" "$@"
echo "$*" >> "$LOG"
version=$(grep -oE 'torch==[0-9.]+' <<< "$*")
grep -qE "^($EXCLUDED)$" <<< "$version" || exit 0
case "$*" in
  *--quiet*) echo "ERROR: Cannot install $version because of conflicts." >&2 ;;
  *) echo "    The user requested (constraint) torch<=0" ;;
esac
exit 1
"""
"""Messages are those of pip 23 to 25."""


def releases(kind: str) -> list[str]:
    """Requirements of `scripts/requirements`, newest first."""
    text = (ROOT / "scripts" / "requirements" / f"{kind}.txt").read_text()
    return re.findall(r"^torch==[\d.]+$", text, re.M)


def set_up(folder: Path, excluded: str, **variables: str) -> tuple[int, str, list[str]]:
    """Status, messages and requirements that pip was given with the package, of one run."""
    interpreter = folder / "bin" / "python"
    interpreter.parent.mkdir(exist_ok=True)
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    log = folder / "log"
    log.write_text("")
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_VERSION"}
    environment |= {"VENV": str(folder), "PYTHON": sys.executable, "REAL": sys.executable}
    environment |= {"LOG": str(log), "EXCLUDED": excluded, **variables}
    command = ["bash", str(ROOT / "scripts" / "setup_env.sh"), "test"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        assert done.stdout.splitlines()[-1] == str(interpreter)
    calls = [line for line in log.read_text().splitlines() if "-e .[test]" in line]
    return done.returncode, done.stderr, [re.findall(r"torch==[\d.]+", call)[0] for call in calls]


def test_the_newest_tested_torch_is_installed_once(tmp_path: Path) -> None:
    newest = releases(KIND)[0]
    status, messages, asked = set_up(tmp_path, "none")
    assert status == 0
    assert asked == [newest]
    assert f"{newest} in {tmp_path}\n" in messages
    assert set_up(tmp_path, "none")[2] == [], "made again without a change"
    stamp = tmp_path / ".installed-test"
    stamp.write_text("of other requirements")
    assert set_up(tmp_path, "none")[2] == [newest]


@pytest.mark.skipif(len(releases(KIND)) == 1, reason="one torch is tested with this Python")
def test_the_next_is_taken_where_a_constraint_excludes_the_newest(tmp_path: Path) -> None:
    newest, following = releases(KIND)[:2]
    status, messages, asked = set_up(tmp_path, re.escape(newest))
    assert status == 0
    assert asked == [newest, following]
    assert f"{following} in {tmp_path}; not {newest}: The user requested (constraint) " in messages


def test_an_error_names_the_constraint_if_none_is_allowed(tmp_path: Path) -> None:
    status, messages, asked = set_up(tmp_path, ".*")
    assert status == 1
    assert asked == releases(KIND)
    expected = (
        "pip may have none of these releases",
        "(constraint) torch<=0",
        "/etc/limits.txt",
        "TORCH_VERSION",
    )
    for text in expected:
        assert text in messages, messages


def test_another_torch_can_be_named(tmp_path: Path) -> None:
    status, _, asked = set_up(tmp_path, "none", TORCH_VERSION="2.11.0")
    assert status == 0
    assert asked == ["torch==2.11.0"]


def test_each_kind_of_python_has_tested_releases_newest_first() -> None:
    for kind in ("older", "newer"):
        versions = [tuple(map(int, re.findall(r"\d+", one))) for one in releases(kind)]
        assert versions
        assert versions == sorted(versions, reverse=True)
