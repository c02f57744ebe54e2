"""Replicas under torchft, of which some are killed and started again."""

from __future__ import annotations

import inspect
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib.elastic.planned import PlannedManager
from tests.lib.elastic.replica import Options
from tests.lib.elastic.run import Lighthouse, Replica, wait_until
from tests.lib.elastic.watched import REPLICAS, goes_on_without, kill_at_random, watched
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


Event = Callable[[list[Replica], Lighthouse], None]
EVENTS: dict[str, Event] = {}
"""What happens to three replicas that train, which then go on together."""


def event(function: Event) -> Event:
    """Puts it into the table, by its name."""
    EVENTS[function.__name__] = function
    return function


@event
def two_are_killed_and_join_at_once(found: list[Replica], lighthouse: Lighthouse) -> None:
    gone = found[1:]
    for one in gone:
        one.kill()
    goes_on_without(found, gone)
    for one in gone:
        one.start()


@event
def one_is_stopped_for_a_while(found: list[Replica], lighthouse: Lighthouse) -> None:
    found[2].signal(signal.SIGSTOP)
    try:
        goes_on_without(found, found[2:])
    finally:
        found[2].signal(signal.SIGCONT)


@event
def the_lighthouse_restarts(found: list[Replica], lighthouse: Lighthouse) -> None:
    lighthouse.kill()
    time.sleep(2.0)
    lighthouse.start()


@event
def one_with_another_option_is_refused(found: list[Replica], lighthouse: Lighthouse) -> None:
    options = replace(found[0].options, replica=REPLICAS, strategy="optim")
    [other] = [Replica(options)]
    other.start()
    try:
        wait_until([*found, other], lambda: any(other.codes), may_end=[other])
        assert "elastic: this replica differs" in other.text()
        assert "options of model 0: " in other.text()
        assert not other.committed()
    finally:
        other.kill()


@pytest.mark.parametrize("name", EVENTS)
def test_replicas_go_on_after(tmp_path: Path, name: str) -> None:
    with watched(Options(str(tmp_path), timeout_s=8.0)) as (found, lighthouse):
        EVENTS[name](found, lighthouse)


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
