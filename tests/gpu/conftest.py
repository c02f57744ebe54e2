"""These tests need two GPUs, or as many as their file says (`GPUS`), or one that ranks may share
(`shared_device.py`); elsewhere they are skipped."""

from pathlib import Path

import pytest

from tests.gpu import shared_device
from tests.gpu.gpu_ranks import Outcomes

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = shared_device.devices()
    for item in items:
        needed = getattr(getattr(item, "module", None), "GPUS", 2)
        if HERE in item.path.parents and found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was not chosen is not run: the checks of a file share one pair of processes."""
    chosen: dict[Outcomes, set[str]] = {}
    for item in session.items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        for outcomes in vars(getattr(item, "module", None) or object).values():
            if isinstance(outcomes, Outcomes):
                chosen.setdefault(outcomes, set()).update({name} & set(outcomes.checks))
    for outcomes, names in chosen.items():
        if names:
            outcomes.checks = {n: check for n, check in outcomes.checks.items() if n in names}
