"""A megatron-core that is not supported is one error, before anything is changed."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_fsdp_adapter import FullyShardedDataParallel, install, releases
from megatron_fsdp_adapter.cli import doctor
from megatron_fsdp_adapter.installation import installed
from megatron_fsdp_adapter.optimizer import uninstall

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
OTHERS = ("0.16.0", "0.16.10", "0.16.1rc0", "0.17.1", "0.18.2", "0.19.2", "of no known version")


def _construct() -> Any:
    """With nothing that construction could use: the version is looked at before anything else."""
    return FullyShardedDataParallel(SimpleNamespace(), SimpleNamespace(), torch.nn.Linear(1, 1))


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("act", [install, _construct])
def test_another_release_is_refused_at_install_and_at_construction(
    monkeypatch: pytest.MonkeyPatch, version: str, act: Any
) -> None:
    uninstall()
    before = dict(vars(DistributedOptimizer))
    monkeypatch.setattr(megatron.core, "__version__", version)
    with pytest.raises(RuntimeError) as caught:
        act()
    message = str(caught.value)
    for part in (f"megatron-core {version} ", "supported is 0.16.1", "megatron-core==0.16.1"):
        assert part in message
    assert dict(vars(DistributedOptimizer)) == before and not installed()


def test_doctor_and_the_package_itself_say_the_same_releases() -> None:
    pinned = re.search(r'"megatron-core==([^"]+)"', PROJECT.read_text())
    assert pinned is not None and pinned[1] in releases.TESTED[releases.CORE]
    installed_version = importlib.metadata.version("megatron-core")
    assert doctor.versions()["megatron-core"]["tested"] is True
    assert releases.core_problem(installed_version) is None
    assert releases.core_problem(f"{installed_version}+built.here") is None


def test_other_packages_are_only_remarked_upon() -> None:
    assert releases.is_tested("torch", "2.11.0+cu130") is True
    assert releases.is_tested("torch", "2.6.0") is False
    assert releases.is_tested("numpy", "2.0") is None
