"""Replicas under torchft, of which some are killed and started again."""

from __future__ import annotations

import inspect
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib.elastic.events import EVENTS
from tests.lib.elastic.planned import PlannedManager
from tests.lib.elastic.replica import Options
from tests.lib.elastic.run import Replica
from tests.lib.elastic.watched import REPLICAS, kill_at_random, text_of_refusal, watched
from tests.lib.scripts.script_runs import run_script

torchft = pytest.importorskip("torchft", reason="needs torchft")

CHECKS = ("core/comm/managed.py", "elastic/state.py", "elastic/facts.py", "plain/elastic.py")

pytestmark = pytest.mark.full


def test_stand_in_has_torchfts_signatures() -> None:
    for name, method in vars(PlannedManager).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        theirs = inspect.signature(getattr(torchft.Manager, name)).parameters
        ours = inspect.signature(method).parameters
        assert [(one.name, one.kind) for one in ours.values()] == [
            (one.name, one.kind) for one in theirs.values()
        ], name
        assert [str(one.default) for one in ours.values()] == [
            str(one.default) for one in theirs.values()
        ], name


@pytest.mark.parametrize(
    "options",
    [
        {"door": "fully_shard"},
        {"door": "fully_shard_model"},
        {"door": "fully_shard_model", "is_async": True},
        {"door": "fully_shard", "sends_by_group": True},
    ],
    ids=str,
)
def test_killed_replicas_come_back_with_the_bits_of_planned_quorums(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with watched(Options(str(tmp_path), **options)) as (found, _):
        list(kill_at_random(found, 2, random.Random(1)))


@pytest.mark.parametrize("name", EVENTS)
def test_replicas_go_on_after(tmp_path: Path, name: str) -> None:
    with watched(Options(str(tmp_path), timeout_s=8.0)) as (found, lighthouse):
        EVENTS[name](found, lighthouse)


def test_a_replica_with_another_option_is_refused(tmp_path: Path) -> None:
    with watched(Options(str(tmp_path), timeout_s=8.0)) as (found, _):
        other = Replica(replace(found[0].options, replica=REPLICAS, strategy="optim"))
        assert "options of model 0: " in text_of_refusal(found, other)


def test_the_script_prints_the_times_of_steps_a_death_and_a_return(tmp_path: Path) -> None:
    options = ("--shape", "tiny", "--layers", "1", "--steps", "3", "--out", str(tmp_path))
    done = run_script("elastic_times.py", *options, "--parts", "hsdp", "sync")
    assert done.returncode == 0, done.stderr
    hsdp, step, death = done.stdout.splitlines()[-3:]
    for line, pattern in (
        (hsdp, r"hsdp +\d+\.\d ms \(.*; host: zero_grad .*, backward "),
        (step, r"sync +\d+\.\d ms \(.*; host: .*, should_commit "),
        (death, r"sync +\d+\.\d\d s from the kill to the next step; .* GB staged in "),
    ):
        assert re.match(pattern, line), done.stdout
