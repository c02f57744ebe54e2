"""Test files say what they check, in `CHECKS`: paths of modules, relative to the package. So
`grep -r optim/step.py tests` finds the tests of a module. Each module is in one; what test files
share lies in tests/lib."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

CHECKS = ()  # reads the tests

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_fsdp_adapter"
PROGRAMS = ("tests/gpu/__main__.py", "tests/hunt/__main__.py")
"""`python -m tests.gpu` and `python -m tests.hunt`, which are called by hand."""


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(text)))


def has_code(text: str) -> bool:
    """False for a file of imports, constants and a docstring."""
    definitions = (ast.FunctionDef, ast.ClassDef)
    return any(isinstance(node, definitions) for node in nodes_of(text))


def modules() -> set[str]:
    """The modules that a test has to name. The face of a package without code is none."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py" or has_code(path.read_text()):
            found.add(str(path.relative_to(PACKAGE)))
    return found


def checks_of(text: str) -> tuple[str, ...] | None:
    """The value of `CHECKS` in a test file; None if it has none."""
    for node in nodes_of(text):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKS":
            return ast.literal_eval(node.value)
    return None


def index_problems(tests: Mapping[str, str], wanted: set[str]) -> Iterator[str]:
    """What is wrong with the index that `CHECKS` of test files (text by path) make."""
    named: set[str] = set()
    for path, text in tests.items():
        checks = checks_of(text)
        if checks is None:
            yield f"{path} has no CHECKS"
            continue
        if not checks and not re.search(r"^CHECKS = \(\)  # \w", text, re.M):
            yield f"{path} checks no module and does not say what it is for"
        named |= set(checks)
        for entry in checks:
            if not (PACKAGE / entry).is_file():
                yield f"{path}: there is no {entry}"
    for module in sorted(wanted - named):
        yield f"{module} is in no CHECKS"


def imported_names(text: str) -> Iterator[str]:
    """Each part of each dotted name that a file imports."""
    for node in nodes_of(text):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield from alias.name.split(".")


def place_problems(files: Mapping[str, str]) -> Iterator[str]:
    """Files of tests/ (text by path) that import a test file, and helpers beside test files."""
    tests = {Path(path).stem for path in files if Path(path).name.startswith("test_")}
    for path, text in files.items():
        for name in sorted(tests.intersection(imported_names(text))):
            yield f"{path} imports {name}"
        is_helper = not Path(path).name.startswith(("test_", "conftest")) and path not in PROGRAMS
        if is_helper != path.startswith("tests/lib/"):
            yield f"{path} is a {'helper' if is_helper else 'test'} and lies elsewhere than such"


FILES = {
    str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))
}
TESTS = {path: text for path, text in FILES.items() if Path(path).name.startswith("test_")}


def test_every_module_is_checked_by_a_file_that_names_it() -> None:
    assert list(index_problems(TESTS, modules())) == []


def test_what_tests_share_lies_in_lib() -> None:
    assert list(place_problems(FILES)) == []


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by these names alone."""
    names = [Path(path).name for path in TESTS]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tests/optim/test_a.py": "x = 1"}, "tests/optim/test_a.py has no CHECKS"),
        ({"tests/optim/test_a.py": "CHECKS = ()"}, "checks no module"),
        ({"tests/optim/test_a.py": 'CHECKS = ("optim/stepp.py",)'}, "there is no optim/stepp.py"),
        ({"tests/core/layout/test_layout_planner.py": "CHECKS = ()  # it"}, "planner.py is in no"),
    ],
)
def test_a_gap_of_the_index_is_found(change: Mapping[str, str], problem: str) -> None:
    before = set(index_problems(TESTS, modules()))
    [found] = set(index_problems({**TESTS, **change}, modules())) - before
    assert problem in found


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("tests/optim/test_a.py", "from tests.optim.test_muon import CASE", "imports test_muon"),
        ("tests/optim/test_a.py", "from tests.optim import test_muon", "imports test_muon"),
        ("tests/lib/gpt/a.py", "def f():\n    import test_muon as m", "imports test_muon"),
        ("tests/optim/a.py", "x = 1", "is a helper"),
        ("tests/lib/gpt/test_a.py", "x = 1", "is a test"),
    ],
)
def test_a_file_in_the_wrong_place_is_found(path: str, text: str, problem: str) -> None:
    [found] = set(place_problems({**FILES, path: text})) - set(place_problems(FILES))
    assert problem in found
