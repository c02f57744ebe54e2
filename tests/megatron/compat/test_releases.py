"""Which megatron-core is used: tested releases silently, newer ones with one warning, older ones
and those that are not as expected not at all, before anything is changed; and what differs between
them is found by what is there."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_fsdp_adapter import FullyShardedDataParallel, install, uninstall
from megatron_fsdp_adapter.core.topology import DENSE
from megatron_fsdp_adapter.megatron.compat import core_api, patches, releases
from megatron_fsdp_adapter.megatron.compat.patches import Patch
from megatron_fsdp_adapter.megatron.compat.table import installed
from megatron_fsdp_adapter.megatron.wrapper.process_groups import build_index, groups_of
from megatron_fsdp_adapter.tools.cli import doctor

CHECKS = (
    "megatron/compat/releases.py",
    "megatron/compat/core_api.py",
    "megatron/compat/core_support.py",
    "megatron/compat/patches.py",
)

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
OLDER = ("0.15.3", "0.16.0", "0.16.1rc0", "of no known version")
NEWER = ("0.16.10", "0.19.3", "0.20.0", "0.20.0rc0", "1.0")


def _construct() -> Any:
    """With nothing that construction could use: the version is looked at before anything else."""
    with suppress(AttributeError, TypeError):
        FullyShardedDataParallel(SimpleNamespace(), SimpleNamespace(), torch.nn.Linear(1, 1))


ACTS = pytest.mark.parametrize("act", [install, _construct])


@pytest.fixture(autouse=True)
def nothing_installed() -> Any:
    uninstall()
    before = dict(vars(DistributedOptimizer))
    yield
    uninstall()
    assert dict(vars(DistributedOptimizer)) == before


def _refusal(act: Callable[[], Any]) -> str:
    before = dict(vars(DistributedOptimizer))
    with pytest.raises(RuntimeError) as caught:
        act()
    assert dict(vars(DistributedOptimizer)) == before
    assert not installed()
    return str(caught.value)


@pytest.mark.parametrize("version", OLDER)
@ACTS
def test_an_older_release_is_refused_at_install_and_at_construction(
    monkeypatch: pytest.MonkeyPatch, version: str, act: Any
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    message = _refusal(act)
    for part in (
        f"megatron-core {version} ",
        "oldest supported release is 0.16.1",
        "megatron-core==0.19.2",
    ):
        assert part in message


def _warnings_of(act: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            act()
    return [str(one.message) for one in caught if "megatron-core" in str(one.message)]


@pytest.mark.parametrize("version", NEWER)
@ACTS
def test_a_newer_release_is_tried_with_one_warning_that_says_what_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, version: str, act: Any
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    said = _warnings_of(act)
    assert len(said) == 1
    assert installed() is (act is install)
    assert f"megatron-core {version} is not tested" in said[0]
    assert "gradient norms" in said[0]


@pytest.mark.parametrize("version", releases.TESTED[releases.CORE])
def test_a_tested_release_is_used_silently(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(megatron.core, "__version__", f"{version}+built.here")
    assert _warnings_of(install) == []


@pytest.mark.parametrize("version", ["0.19.2", "0.20.0"])
@ACTS
def test_a_replaced_method_with_other_parameters_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, version: str, act: Any
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    monkeypatch.setattr(MegatronOptimizer, "clip_grad_norm", lambda self, clip_grad, scale: 0.0)
    message = _refusal(act)
    assert "DistributedOptimizer.clip_grad_norm" in message
    assert "(self, clip_grad, scale), expected (self, clip_grad)" in message


@ACTS
def test_a_replaced_method_that_is_gone_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, act: Any
) -> None:
    monkeypatch.delattr(MegatronOptimizer, core_api.NORM_GRADIENTS)
    either = "get_grads_for_grad_norm or get_main_grads_for_grad_norm"
    assert f"DistributedOptimizer.{either} (there is none)" in _refusal(act)


FORMS = {
    "self, first, second": True, "self, ...": True, "self, first, ...": True, "...": True,
    "self, first": False, "self, second, ...": False, "": False,
}  # fmt: skip
"""Whether they are those of `self, first, second`."""


def test_parameters_are_compared_with_each_known_form(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = ModuleType("owner")
    owner.name = lambda self, first, second: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "owner", owner)
    found = patches.missing([Patch("owner", "name", len, parameters=(form,)) for form in FORMS])
    given = "owner.name (its parameters are (self, first, second), expected"
    assert found == [f"{given} ({form}))" for form, is_known in FORMS.items() if not is_known]
    assert patches.missing([Patch("owner", "name", len, parameters=("", "..."))]) == []


def test_doctor_and_the_package_itself_say_the_same_releases() -> None:
    pinned = re.search(r'"megatron-core>=([^,"]+),<([^"]+)"', PROJECT.read_text())
    assert pinned is not None
    assert pinned[1] == releases.TESTED[releases.CORE][0]
    newest = releases.parse(releases.TESTED[releases.CORE][-1])
    assert newest is not None and newest < releases.parse(pinned[2])  # type: ignore[operator]
    assert doctor.versions()["megatron-core"]["tested"] is True
    assert releases.core_problem(importlib.metadata.version("megatron-core")) is None


REMARKS = {
    ("torch", "2.11.0+cu130"): "tested", ("torch", "2.13.1"): "tested",
    ("torch", "2.110.0"): "not tested; tested are", ("torch", "2.16.0"): "not tested; tested are",
    ("transformer-engine", "2.21.0"): "not tested; tested are",
    ("megatron-core", "0.20.0"): "not tested; tested are",
    ("torch", "2.6.0"): "older than what is tested",
    ("transformer-engine", "2.9.0"): "older than what is tested",
}  # fmt: skip


def test_other_packages_are_only_remarked_upon() -> None:
    found = {known: releases.remark(*known) for known in REMARKS}
    for known, says in REMARKS.items():
        assert found[known].startswith(says), found
    assert releases.remark("numpy", "2.0") == ""


def test_groups_are_asked_for_ranks_that_hold_the_same_weights() -> None:
    """From 0.19 on core's data-parallel groups contain ranks that hold other parts of a weight."""

    def newer(with_gtp_remat: bool = True, partial: bool = False) -> tuple[bool, bool]:
        return with_gtp_remat, partial

    assert core_api.without_remat(newer, partial=True) == (False, True)
    assert core_api.without_remat(lambda partial: partial, partial=True) is True


# Megatron-LM's --create-all-gather-group: the second communicator is used for gathers.


OPTION = "create_all_gather_group"
CAN_MAKE = OPTION in inspect.signature(parallel_state.initialize_model_parallel).parameters


@pytest.fixture(params=(True, False) if CAN_MAKE else (False,))
def has_group(four_fake_ranks: None, request: pytest.FixtureRequest) -> Iterator[bool]:
    options = {OPTION: request.param} if CAN_MAKE else {}
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **options)
    yield request.param
    parallel_state.destroy_model_parallel()


def test_dense_weights_are_gathered_on_it(has_group: bool) -> None:
    groups = groups_of(None)
    assert (groups["fsdp_group_ag"] is not None) == has_group
    assert groups["fsdp_group_ag"] is not groups["fsdp_group"]
    index = build_index(groups, device=torch.device("cpu"), grad_scale_of=lambda ranks: 1 / ranks)
    domain = index.domain(DENSE)
    wanted = groups["fsdp_group_ag"] if has_group else groups["fsdp_group"]
    assert domain.gather_group is wanted
