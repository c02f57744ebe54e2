"""State is explained where it is assigned: each attribute has a comment, or a docstring, there."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_fsdp_adapter

CHECKS = ()  # reads the source

PACKAGE = Path(megatron_fsdp_adapter.__file__).parent

FILES = [*sorted(PACKAGE.glob("core/engine/*.py")), PACKAGE / "optim/local_shards.py"]

DATACLASSES = (
    "Backward",
    "DomainReduce",
    "InFlight",
    "Launched",
    "Reduction",
    "Step",
    "_Comparison",
)
"""Those that are looked at besides classes with an `__init__`."""


def comment_lines(text: str) -> set[int]:
    """Numbers of the lines with a comment for readers."""
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        for_tools = token.string.startswith(("# type:", "# fmt:", "# noqa"))
        if token.type == tokenize.COMMENT and not for_tools:
            found.add(token.start[0])
    return found


def classes_of(tree: ast.Module) -> Iterator[ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            if "__init__" in methods or node.name in DATACLASSES:
                yield node


def names_of(statement: ast.AST, in_class: bool) -> list[str]:
    """The attributes that a statement assigns: of the class itself, or of `self`."""
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Assign):
        targets = list(statement.targets)
    else:
        return []
    found = []
    for target in targets:
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            if in_class and isinstance(one, ast.Name):
                found.append(one.id)
            elif isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                found.append(one.attr)
    return found


def assignments(block: list[ast.stmt], above: int = 0) -> Iterator[tuple[ast.stmt, int]]:
    """All statements in a block, in order, each with the line in front of it, which is that in
    front of an `if`, `with` or `for` whose first statement it is."""
    for index, statement in enumerate(block):
        if index == 0 and above:
            line = above
        else:
            line = statement.lineno - 1
        yield statement, line
        for name in ("body", "orelse"):
            inner = getattr(statement, name, [])
            yield from assignments(inner, line if name == "body" else 0)


def uncommented(text: str) -> list[str]:
    """The attributes whose first assignment has no comment on its lines or right above."""
    commented = comment_lines(text)
    missing = []
    for owner in classes_of(ast.parse(text)):
        known = set()
        for index, statement in enumerate(owner.body):
            follower = owner.body[index + 1 : index + 2]
            is_explained = (
                bool(follower) and ast.get_docstring(ast.Module(follower, [])) is not None
            )
            for name in names_of(statement, in_class=True):
                known.add(name)
                lines = range(statement.lineno - 1, statement.end_lineno + 1)
                if not is_explained and commented.isdisjoint(lines):
                    missing.append(f"{owner.name}.{name}")
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            for statement, above in assignments(method.body):
                for name in names_of(statement, in_class=False):
                    lines = {above, *range(statement.lineno, statement.end_lineno + 1)}
                    if name not in known and commented.isdisjoint(lines):
                        missing.append(f"{owner.name}.{name}")
                    known.add(name)
    return missing


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_attribute_has_its_comment(path: Path):
    assert uncommented(path.read_text()) == []


def test_an_attribute_without_a_comment_is_found():
    text = """
class Holder:
    first = 1
    \"\"\"Of the class.\"\"\"
    second = 2

    def __init__(self):
        self.third = 3  # behind
        # above
        self.fourth = 4
        self.fifth, self.sixth = 5, 6
        self.first = 7
        # above a condition
        if self.third:
            self.seventh = 7
        else:
            self.seventh = 8

    def prepare(self):
        with open(__file__):
            self.eighth = 8  # type: ignore
"""
    assert uncommented(text) == [
        f"Holder.{name}" for name in ("second", "fifth", "sixth", "eighth")
    ]
