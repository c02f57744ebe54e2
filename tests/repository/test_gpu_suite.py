"""The tests for GPUs, without one: every module is imported, with and without Transformer Engine;
every check fits what it calls.

Calls inside of checks, and types, are mypy's, whose configuration names tests/gpu; parameters of
tests are pytest's, which collects them here too.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import outcomes_of
from tests.lib.gpu.gpu_ranks import Check, Outcomes
from tests.lib.gpu.on_host import run_on_host

CHECKS = ()  # of tests/gpu

ROOT = Path(__file__).resolve().parents[2]
MODULES = tuple(path.stem for path in sorted((ROOT / "tests/gpu").glob("test_*.py")))
TE = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine_torch")


@pytest.fixture(params=(False, True), ids=("without Transformer Engine", "with its name"))
def suite(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Every module of tests/gpu, imported again; by name. Those that need Transformer Engine skip
    themselves without. It is there by name alone: no module may use more of it when imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.split(".")[:2] == ["tests", "gpu"]]:
        if name.rpartition(".")[2].startswith("test_"):
            monkeypatch.delitem(sys.modules, name)
    for name in TE if request.param else ():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        monkeypatch.setitem(sys.modules, name, module)
    found = {}
    before = set(sys.modules)
    for name in MODULES:
        try:
            found[name] = importlib.import_module(f"tests.gpu.{name}")
        except pytest.skip.Exception:
            assert not request.param, name
    yield found
    for name in set(sys.modules) - before:
        if name.startswith("tests.gpu.test_"):
            del sys.modules[name]


def checks_of(module: types.ModuleType) -> dict[str, Check]:
    """Of its outcomes, and of tables of its own."""
    found = {name: c for one in outcomes_of(module) for name, c in one.checks.items()}
    for value in vars(module).values():
        for name, check in value.items() if isinstance(value, dict) else ():
            if isinstance(check, Check):
                found[str(name)] = check
    return found


def test_every_check_fits_what_it_calls(suite: Mapping[str, types.ModuleType]) -> None:
    wrong = []
    count = 0
    for name, module in suite.items():
        for label, check in checks_of(module).items():
            count += 1
            try:
                inspect.signature(check.function).bind(0, 2, *check.arguments)
            except TypeError as error:
                wrong.append(f"{name}, {label}: {error}")
        alike = Counter(f"{c.function} {c.arguments}" for c in checks_of(module).values())
        wrong += [f"{name} has {one} {times} times" for one, times in alike.items() if times > 1]
    assert not wrong, "\n".join(wrong)
    assert count > 350, count


ON_THE_HOST: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # One or two for each function that checks call.
    "most": {
        "test_gpu_changed_models": ("export, optim",),
        "test_gpu_numerics": ("bits, 2 ranks, 3 microbatches, fp32",),
        "test_gpu_offload": ("bits, hidden 4096",),
        "test_gpu_optimizer": ("Megatron's, optim",),
        "test_gpu_precision": ("optim, bf16 communication, fp32 sums",),
        "test_gpu_slots": ("double buffer",),
    },
    # Of the same functions.
    "more": {
        "test_gpu_changed_models": ("released, slots", "part of a layer frozen"),
        "test_gpu_numerics": ("strategies agree",),
    },
    # In processes of their own, whose groups are others.
    "experts": {
        "test_gpu_experts": ("SequentialMLP, fp32, alltoall", "SequentialMLP, fp32, allgather"),
    },
    "reshard": {"test_gpu_experts": ("SequentialMLP, fp32, resharded",)},
}
"""Checks that need neither CUDA nor Transformer Engine. Others need graphs, NCCL's memory, TE's
layers, or what an allocator says."""


@pytest.mark.parametrize(
    "chosen",
    [pytest.param(name, marks=[pytest.mark.full] * (name != "most")) for name in ON_THE_HOST],
)
def test_checks_run_on_ranks_of_the_host(chosen: str) -> None:
    checks = {}
    for module, names in ON_THE_HOST[chosen].items():
        known = checks_of(importlib.import_module(f"tests.gpu.{module}"))
        for name in names:
            checks[f"{module}: {name}"] = Check(run_on_host, (known[name],))
    outcomes = Outcomes(checks, timeout_s=240.0, backend="gloo")
    for name in checks:
        outcomes.expect(name)
