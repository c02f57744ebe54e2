"""State of the engine is written in `core/` alone: other code calls methods."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

import megatron_fsdp_adapter

CHECKS = ()  # reads the source

PACKAGE = Path(megatron_fsdp_adapter.__file__).parent

FILES = sorted(PACKAGE.rglob("*.py"))

WORDS = frozenset(
    {"backward", "direct", "engine", "gather", "grad", "grads", "group", "main", "order", "pair",
     "quantization", "reduce", "step", "switch", "unit", "units", "weights"}
)  # fmt: skip
"""Words in the name of what is an engine, or a part of one: `self._engine`, `engine_of(model)`."""


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that a statement, or a call of `setattr` or `delattr`, assigns to."""
    if isinstance(node, ast.Assign | ast.Delete):
        pending = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.comprehension):
        pending = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        pending = [node.optional_vars]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
        name = node.args[1]
        given = isinstance(name, ast.Constant) and isinstance(name.value, str)
        pending = [ast.Attribute(node.args[0], name.value)] if given else []
    else:
        pending = []
    while pending:
        target = pending.pop()
        if isinstance(target, ast.Tuple | ast.List):
            pending += target.elts
        elif isinstance(target, ast.Starred):
            pending.append(target.value)
        else:
            yield target


def state_of(text: str) -> set[str]:
    """The attributes of the classes of a file: those of the classes, and those of `self`."""
    found = set()
    for owner in ast.walk(ast.parse(text)):
        if not isinstance(owner, ast.ClassDef):
            continue
        for statement in owner.body:
            found |= {one.id for one in targets_of(statement) if isinstance(one, ast.Name)}
        for node in ast.walk(owner):
            for target in targets_of(node):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.add(target.attr)
    return found


def name_of(base: ast.expr) -> str:
    """The last name in an expression: of a variable, an attribute, or a function that is called."""
    while isinstance(base, ast.Call | ast.Subscript):
        base = base.func if isinstance(base, ast.Call) else base.value
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else ""


def written(text: str, state: set[str], of_others: set[str]) -> list[str]:
    """The writes of a file to attributes of `state`. An object may write its own: those of `self`
    and of `cls`. Attributes `of_others` count only where the name of the object has one of `WORDS`.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        for target in targets_of(node):
            if not isinstance(target, ast.Attribute) or target.attr not in state:
                continue
            owner = name_of(target.value)
            is_engine = target.attr not in of_others or not WORDS.isdisjoint(owner.split("_"))
            if is_engine and owner not in ("self", "cls"):
                found.append(ast.unparse(target))
    return found


def test_nothing_outside_core_writes_state_of_an_engine_a_unit_or_a_group():
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in FILES}
    state = set()
    of_others = set(dir(torch.nn.Parameter)) | set(dir(torch.nn.Module))
    for file, text in texts.items():
        if file.startswith("core/engine/"):
            state |= state_of(text)
        else:
            of_others |= state_of(text)
    found = set()
    for file, text in texts.items():
        if not file.startswith("core/"):
            found |= {f"{file}: {target}" for target in written(text, state, of_others)}
    assert found == set()


def test_each_way_to_write_an_attribute_is_found():
    state = state_of("""
class Engine:
    of_the_class: int = 0

    def __init__(self):
        self.plain, (self.packed, self.rest) = 1, (2, 3)

    def start(self):
        self.late = 4
""")
    assert state == {"of_the_class", "plain", "packed", "rest", "late"}
    text = """
class Mine(Engine):
    def run(self):
        self.plain = 1
        other.plain = self.unknown = 2
        self.engine.late += 3
        (given, engine_of(self).packed) = 1, 2
        for one.rest in ():
            setattr(units[0], "of_the_class", 1)
        with opened() as engine.late:
            del engine.plain
        self._engine.late: int = 5
        proof.late = engine.late
"""
    assert sorted(written(text, state, {"late"})) == [
        "engine.late", "engine.plain", "engine_of(self).packed", "one.rest", "other.plain",
        "self._engine.late", "self.engine.late", "units[0].of_the_class",
    ]  # fmt: skip
