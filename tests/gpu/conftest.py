"""These tests need two GPUs; elsewhere they are skipped."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.device_count() >= 2:
        return
    skip = pytest.mark.skip(reason="needs two CUDA devices")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)
