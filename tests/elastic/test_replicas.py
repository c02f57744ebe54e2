"""Replicas under torchft, of which some are killed and started again."""

from __future__ import annotations

import inspect
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import elastic_optimizer
from tests.lib.elastic.planned import Attempt, PlannedManager
from tests.lib.elastic.replica import RANKS, Options, data_of, digest, sharded
from tests.lib.elastic.run import Replica, all_take, lighthouse, replicas, wait_until
from tests.lib.ranks.launch import run_ranks

torchft = pytest.importorskip("torchft", reason="needs torchft")

CHECKS = ("core/comm/managed.py", "elastic/state.py", "elastic/facts.py", "plain/elastic.py")

pytestmark = pytest.mark.full

REPLICAS = 3


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


def planned_run(
    rank: int, world: int, door: str, plans: Sequence[Sequence[Attempt]]
) -> list[tuple[str, str]]:
    """Loss and weights of each step of a run without failures. plans: by rank of a replica."""
    mesh = init_device_mesh("cpu", (world // RANKS, RANKS), mesh_dim_names=("replica", "shard"))
    replica, place = divmod(rank, RANKS)
    plan = plans[place]
    manager = PlannedManager(mesh["replica"].get_group(), replica, plan)
    model, inner = sharded(door, manager, mesh["shard"])
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 3, 0.9)
    optimizer = elastic_optimizer(manager, inner, model)
    found = []
    for step in range(len(plan)):
        optimizer.zero_grad()
        loss = model(data_of(step, replica, place))
        loss.backward()
        optimizer.step()
        scheduler.step()
        found.append((loss.item().hex(), digest(model)))
    return found


def plan_of(found: Sequence[Replica], rank: int) -> list[Attempt]:
    """The replicas whose gradients each committed step has on a rank. All that have committed it
    must agree. In the first step torchft lets each rank take the weights of another replica."""
    by_step: dict[int, tuple[list[int], int]] = {}
    without: dict[int, set[int]] = {}
    for one in found:
        for line in one.committed(rank):
            step = line["step"]
            mine = (line["replicas"], line["participants"])
            assert by_step.setdefault(step, mine) == mine
            if not line["takes_part"]:  # it joins beside its forward
                without.setdefault(step, set()).add(one.options.replica)
    assert sorted(by_step) == list(range(len(by_step)))  # no committed step is missing
    plan = []
    for step in range(len(by_step)):
        here, count = by_step[step]
        present = [one for one in here if one not in without.get(step, ())]
        # Only in the first step torchft counts replicas whose gradients it zeroes.
        assert count == (len(present) if step else len(here))
        plan.append(Attempt(present, count))
    return plan


def check_as_planned(found: Sequence[Replica], door: str) -> None:
    """Each committed step of each replica has the bits of the run with the same quorums."""
    plans = [plan_of(found, rank) for rank in range(RANKS)]
    expected = run_ranks(planned_run, REPLICAS * RANKS, door, plans, timeout=300.0)
    for one in found:
        for rank in range(RANKS):
            for line in one.committed(rank):
                here = (one.options.replica, rank, line["step"], plans[rank][line["step"]])
                loss, weights = expected[RANKS * one.options.replica + rank][line["step"]]
                assert line["loss"] in (loss, ""), here
                assert line["weights"] == weights, here


def pids(one: Replica) -> set[int]:
    """The processes that have written."""
    return {line["pid"] for line in one.log()}


def kill_and_restart(found: Sequence[Replica], victim: Replica, rank: int) -> None:
    """Kills a rank of a replica, lets the others go on, and starts that replica again, as its
    launcher would."""
    others = [one for one in found if one is not victim]
    victim.kill([rank])
    here = [one.options.replica for one in others]
    wait_until(
        found,
        lambda: all(one.committed()[-1]["replicas"] == here for one in others),
        180.0,
        [victim],
    )
    victim.kill()
    victim.start()


def run_with_kills(options: Options, kills: int, seed: int) -> list[Replica]:
    """Kills a random rank of a random replica at random moments. Returns the replicas, which have
    ended."""
    chance = random.Random(seed)
    with (
        lighthouse() as address,
        replicas(REPLICAS, replace(options, lighthouse=address)) as found,
    ):
        all_take(found, 2)
        for _ in range(kills):
            wait_s = chance.uniform(0.0, 0.5)
            signal.sigtimedwait([], wait_s)
            kill_and_restart(found, chance.choice(found), chance.randrange(RANKS))
            all_take(found, 2)
    for one in found:
        assert len(pids(one)) == one.starts  # nothing else has ended
    return found


@pytest.mark.parametrize(
    "door, is_async",
    [("fully_shard", False), ("fully_shard_model", False), ("fully_shard_model", True)],
)
def test_killed_replicas_come_back_with_the_bits_of_planned_quorums(
    tmp_path: Path, door: str, is_async: bool
) -> None:
    found = run_with_kills(Options(str(tmp_path), door=door, is_async=is_async), 2, 1)
    assert sum(one.starts for one in found) == REPLICAS + 2
    check_as_planned(found, door)
