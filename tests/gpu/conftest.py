"""These tests need two GPUs, or as many as their file says (`GPUS`); elsewhere they are skipped."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    for item in items:
        needed = getattr(getattr(item, "module", None), "GPUS", 2)
        if HERE in item.path.parents and found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices"))
