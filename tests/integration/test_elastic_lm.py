"""Replicas of Megatron-LM's pretrain_gpt.py under torchft, of which some are killed and started
again.

Opt-in, as tests/integration/test_megatron_lm.py, with torchft.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fsdp_adapter.checkpoint import folders
from tests.lib.elastic.events import EVENTS
from tests.lib.elastic.lm import LmOptions, LmReplica, watched
from tests.lib.elastic.run import all_take, wait_until
from tests.lib.elastic.watched import REPLICAS, goes_on_without, kill_at_random, text_of_refusal
from tests.lib.integration.lm_runs import EP2, MOE, PP2, TP2, VPP2

pytest.importorskip("torchft", reason="needs torchft")

CHECKS = ("megatron/elastic/run.py", "megatron/elastic/loop.py", "megatron/elastic/manager.py")

pytestmark = pytest.mark.full

SPLITS = {
    "data parallelism": "",
    "tensor parallelism": TP2,
    "experts": MOE,
    "expert parallelism": f"{MOE} {EP2}",
    "pipeline": PP2,
    "interleaved pipeline": f"--num-layers 4 {VPP2}",
}
"""Flags of replicas whose two ranks split something beside data."""


@pytest.mark.parametrize("name", SPLITS)
def test_one_is_killed_twice_and_comes_back(megatron_lm: Path, tmp_path: Path, name: str) -> None:
    with watched(LmOptions(str(tmp_path), checkout=megatron_lm, flags=SPLITS[name])) as (found, _):
        list(kill_at_random(found, 2, random.Random(1)))


@pytest.mark.parametrize("name", EVENTS)
def test_replicas_go_on_after(megatron_lm: Path, tmp_path: Path, name: str) -> None:
    options = LmOptions(str(tmp_path), checkout=megatron_lm, timeout_s=8.0)
    with watched(options) as (found, lighthouse):
        EVENTS[name](found, lighthouse)


def test_a_replica_that_is_later_than_the_limit_takes_part_as_the_limit_grows(
    megatron_lm: Path, tmp_path: Path
) -> None:
    options = LmOptions(str(tmp_path), checkout=megatron_lm, timeout_s=2.0)
    with watched(options, join_timeout_ms=60_000) as (found, _):
        found[2].kill()
        found[2].options.pause_s = 5.0
        found[2].start()
        all_take(found, 3)
    assert any(not line["committed"] for line in found[2].log())


def test_a_replica_with_other_options_and_another_commit_is_refused(
    megatron_lm: Path, tmp_path: Path
) -> None:
    commit = tmp_path / "commit"
    commit.mkdir()
    (commit / "further.py").write_text("")
    with watched(LmOptions(str(tmp_path), checkout=megatron_lm)) as (found, _):
        options = replace(found[0].options, flags="--seed 7 --lr 0.1", further_code=str(commit))
        text = text_of_refusal(found, LmReplica(replace(options, replica=REPLICAS)))
    assert re.search(r"- code: (\w+) here, (?!\1)\w+ there", text)
    assert "--lr: 0.1 here, 0.001 there" in text
    assert "--seed: 7 here, 1234 there" in text


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
