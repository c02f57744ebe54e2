"""What verl loads of this package changes nothing until a model is built with its flag."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_fsdp_adapter.megatron.compat import patches

CHECKS = ("launch/verl_plugin.py",)

PLUGIN = "megatron_fsdp_adapter.launch.verl_plugin"
MODULES = ("verl", "verl.utils", "verl.utils.megatron_utils")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loaded in front of a package with the function that is changed (as in verl 0.9.1)."""
    folder = tmp_path / "verl" / "utils"
    folder.mkdir(parents=True)
    for at in (folder, folder.parent):
        (at / "__init__.py").touch()
    (folder / "megatron_utils.py").write_text(
        "def make_megatron_module(wrap_config, tf_config, hf_config, bridge=None):\n"
        "    return wrap_config, bridge\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    with mock.patch.dict(sys.modules):
        for name in (PLUGIN, *MODULES):
            sys.modules.pop(name, None)
        yield importlib.import_module(PLUGIN)


@pytest.mark.parametrize("asked", [False, True])
def test_a_model_with_the_flag_is_built_after_install(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr(plugin, "install", install := mock.Mock())
    assert "verl" not in sys.modules
    assert not patches.is_installed(plugin.BUILD)
    before = len(sys.meta_path)
    module = importlib.import_module("verl.utils.megatron_utils")
    assert len(sys.meta_path) == before - 1
    config = SimpleNamespace(use_megatron_fsdp=asked)
    assert module.make_megatron_module(config, None, None, bridge=3) == (config, 3)
    assert install.call_count == asked
