"""Replicas of Megatron-LM's pretrain_gpt.py under torchft, of which some are killed and started
again.

Opt-in, as tests/integration/test_megatron_lm.py, with torchft.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fsdp_adapter.checkpoint import folders
from tests.lib.elastic.lm import LmOptions, LmReplica, watched
from tests.lib.elastic.run import Lighthouse, wait_until
from tests.lib.elastic.watched import REPLICAS, goes_on_without, kill_at_random

pytest.importorskip("torchft", reason="needs torchft")

CHECKS = ("megatron/elastic/run.py", "megatron/elastic/loop.py", "megatron/elastic/manager.py")

pytestmark = pytest.mark.full

Event = Callable[[list[LmReplica], Lighthouse], None]
EVENTS: dict[str, Event] = {}
"""What happens to three replicas that train, which then go on together, with the bits of a run
whose steps have the same replicas by plan."""


def event(function: Event) -> Event:
    """Puts it into the table, by its name."""
    EVENTS[function.__name__] = function
    return function


@event
def one_is_killed_twice(found: list[LmReplica], lighthouse: Lighthouse) -> None:
    list(kill_at_random(found, 2, random.Random(1)))


@event
def two_are_killed_and_join_at_once(found: list[LmReplica], lighthouse: Lighthouse) -> None:
    for one in found[1:]:
        one.kill()
    goes_on_without(found, found[1:])
    for one in found[1:]:
        one.start()


@event
def one_is_stopped_for_a_while(found: list[LmReplica], lighthouse: Lighthouse) -> None:
    found[2].signal(signal.SIGSTOP)
    try:
        goes_on_without(found, found[2:])
    finally:
        found[2].signal(signal.SIGCONT)


@event
def the_lighthouse_restarts(found: list[LmReplica], lighthouse: Lighthouse) -> None:
    lighthouse.kill()
    time.sleep(2.0)
    lighthouse.start()


@event
def one_with_another_option_is_refused(found: list[LmReplica], lighthouse: Lighthouse) -> None:
    other = LmReplica(replace(found[0].options, replica=REPLICAS, flags="--seed 7 --lr 0.1"))
    other.start()
    try:
        wait_until([*found, other], lambda: any(other.codes), may_end=[other])
        assert "elastic: this replica differs" in other.text()
        assert "--lr: 0.001 here" not in other.text()
        assert "--lr: 0.1 here, 0.001 there" in other.text()
        assert "--seed: 7 here, 1234 there" in other.text()
        assert not other.committed()
    finally:
        other.kill()


@pytest.mark.parametrize("name", EVENTS)
def test_replicas_go_on_after(megatron_lm: Path, tmp_path: Path, name: str) -> None:
    options = LmOptions(str(tmp_path), checkout=megatron_lm, timeout_s=8.0)
    with watched(options) as (found, lighthouse):
        EVENTS[name](found, lighthouse)


def test_a_replica_whose_disk_is_full_dies_and_others_go_on(
    megatron_lm: Path, tmp_path: Path
) -> None:
    """The first replica saves, into a folder of its own with a limit on the size of files. The
    second saves the next checkpoint."""
    roots = [tmp_path / f"root{number}" for number in range(REPLICAS)]
    for root in roots:
        root.mkdir()
    options = LmOptions(str(tmp_path), checkout=megatron_lm, roots=roots, file_limit=(0, 300_000))
    with watched(options) as (found, _):
        wait_until(found, lambda: any(found[0].codes), may_end=[found[0]])
        assert "File too large" in found[0].text()
        goes_on_without(found, [found[0]])
        wait_until(found, lambda: folders.complete_iterations(roots[1]) != (), may_end=[found[0]])
        found[0].kill()
        found[0].options.file_limit = None
        found[0].start()
    assert folders.complete_iterations(roots[0]) == ()
