"""Rows of names that the package replaces, in code that is used if it is loaded, around stand-ins;
and what is put in the place of each kind of owner."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.patches import NOTHING, Patch, stands
from megatron_fsdp_adapter.megatron.compat.table import ALL, BRIDGE, LATE
from megatron_fsdp_adapter.megatron.elastic import manager

CHECKS = ("megatron/compat/patches.py", "megatron/compat/table.py")

ROWS = [row for row in LATE if row.required is not False and row.default is NOTHING]
Modules = dict[str, ModuleType]


def _owner(modules: Modules, row: Patch) -> Any:
    *classes, _ = row.name.split(".")
    if classes:
        return getattr(modules[row.module], classes[0])
    return modules[row.module]


def _function(row: Patch) -> Any:
    """With the parameters that the row expects."""
    names = [form.removesuffix(", ...") for form in row.parameters[:1]] or ["*args"]
    return eval(f"lambda {names[0]}: None")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Modules:
    """Megatron-LM, one of several replicas, and Megatron-Bridge, which save asynchronously, with
    all names but those that have a default."""
    made = {row.module: ModuleType(row.module) for row in LATE}
    made[BRIDGE].HAVE_NVRX = True  # type: ignore[attr-defined]
    for row in LATE:
        for name in row.name.split(".")[:-1]:
            if not hasattr(made[row.module], name):
                setattr(made[row.module], name, type(name, (), {}))
        if row.default is NOTHING:
            last = row.name.split(".")[-1].split(" or ")[-1]
            setattr(_owner(made, row), last, torch if last == "torch" else _function(row))
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    asked = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(async_save=True))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", asked)
    monkeypatch.setattr(manager, "_asked", {"lighthouse": "host:1"})
    return made


def test_what_is_put_in_place_is_there():
    """Rows name it by "module:name" of this package, in every table."""
    names = [row.ours for row in ALL if isinstance(row.ours, str) and ":" in row.ours]
    assert len(names) > 50
    for name in names:
        assert patches._looked_up(name) is not None, name
    with pytest.raises(AttributeError):
        patches._looked_up("megatron.wrapper.adapter:Gone")


def _held(modules: Modules) -> list[tuple[str, dict[str, Any]]]:
    owners = [(row.path, dict(vars(_owner(modules, row)))) for row in LATE]
    found = []
    for path, held in owners:
        found.append((path, {n: v for n, v in held.items() if n != "__builtins__"}))
    return found


def test_every_row_is_put_in_place_once_and_taken_back_exactly(modules: Modules) -> None:
    before = _held(modules)
    patches.install(LATE)
    assert all(patches.is_installed(row) for row in LATE)
    once = _held(modules)
    patches.install(LATE)
    assert _held(modules) == once != before
    for _ in range(2):
        patches.uninstall(LATE)
        assert _held(modules) == before


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_a_name_that_is_gone_is_an_error_before_anything_is_changed(
    modules: Modules, row: Patch
) -> None:
    """Left alone, a save or a load would go on in a way that is not known here."""
    delattr(_owner(modules, row), row.name.split(".")[-1].split(" or ")[-1])
    before = _held(modules)
    by = f", by which it {row.why}" if row.why else ""
    with pytest.raises(RuntimeError, match=re.escape(f"there is no {row.path}{by}. Install one")):
        patches.install(LATE)
    assert _held(modules) == before


def test_some_names_are_needed_only_where_their_purpose_is_asked_for(modules: Modules) -> None:
    """Asynchronous saves, which 0.16.1 cannot, nor Megatron-Bridge without a package; and replicas
    that may die."""
    manager._asked.clear()
    modules[BRIDGE].HAVE_NVRX = False  # type: ignore[attr-defined]
    sys.modules["megatron.training.global_vars"]._GLOBAL_ARGS = None  # type: ignore[attr-defined]
    for row in ROWS:
        if row.required is not True:
            delattr(_owner(modules, row), row.name)
    assert patches.missing(LATE) == []


class _Base:
    def inherited(self) -> str:
        return "core's"

    @staticmethod
    def static() -> str:
        return "core's"


def test_methods_of_any_kind_are_called_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("owner")
    module.Owner = type("Owner", (_Base,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "owner", module)
    rows = [
        Patch("owner", f"Owner.{name}", lambda original, *args: (original(*args), len(args)))
        for name in ("inherited", "static")
    ]
    before = dict(vars(module.Owner))
    patches.install(rows)
    assert module.Owner().inherited() == ("core's", 1)
    assert module.Owner().static() == module.Owner.static() == ("core's", 0)
    assert _Base().inherited() == _Base.static() == "core's"
    patches.uninstall(rows)
    assert dict(vars(module.Owner)) == before


def test_what_another_package_puts_over_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("owner")
    module.name = "core's"  # type: ignore[attr-defined]
    rows = [Patch("owner", "name", ["ours"], stands)]
    monkeypatch.setitem(sys.modules, "owner", module)
    patches.install(rows)
    module.name = "theirs"
    patches.uninstall(rows)
    assert module.name == "theirs"
    assert not patches.is_installed(rows[0])
