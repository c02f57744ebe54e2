"""These tests need two GPUs, or as many as their file says (`GPUS`), or one that ranks may share
(`shared_device.py`); elsewhere they are skipped."""

from pathlib import Path

import pytest

from tests.lib.gpu import shared_device
from tests.lib.gpu.gpu_ranks import Outcomes

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = shared_device.devices()
    for item in items:
        needed = getattr(getattr(item, "module", None), "GPUS", 2)
        if HERE in item.path.parents and found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices"))


def outcomes_of(module: object) -> list[Outcomes]:
    """What a module of tests runs its checks with."""
    found: list[Outcomes] = []
    for value in vars(module).values():
        if isinstance(value, dict):
            values = list(value.values())
        else:
            values = [value]
        found += [one for one in values if isinstance(one, Outcomes)]
    return found


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was not chosen is not run, and the rest in the order of the tests: the checks of a file
    share one pair of processes."""
    chosen: dict[Outcomes, list[str]] = {}
    for item in session.items:
        called = getattr(item, "callspec", None)
        if called is not None:
            name = called.params.get("name")
        else:
            name = None
        for outcomes in outcomes_of(getattr(item, "module", None) or object):
            if name in outcomes.checks:
                chosen.setdefault(outcomes, []).append(str(name))
    for outcomes, names in chosen.items():
        outcomes.checks = {name: outcomes.checks[name] for name in names}


def pytest_sessionfinish(session: pytest.Session) -> None:
    for module in {getattr(item, "module", None) for item in session.items}:
        for outcomes in outcomes_of(module or object):
            outcomes.close()
