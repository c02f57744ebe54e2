"""Three replicas that train under torchft while something happens to them. They are compared, bit
for bit, with a run in which the same replicas were planned for each step.

    python -m tests.lib.elastic.watched --kills 50 --seed 1

kills random ranks at random moments, and prints seconds from each kill to the next committed step,
and to the first with all replicas."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import elastic_optimizer
from tests.lib.elastic.planned import Attempt, PlannedManager
from tests.lib.elastic.replica import RANKS, Options, data_of, digest, sharded
from tests.lib.elastic.run import Lighthouse, Replica, all_take, replicas, wait_until
from tests.lib.ranks.launch import run_ranks

REPLICAS = 3


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


def goes_on_without(found: Sequence[Replica], gone: Sequence[Replica]) -> None:
    """Waits until all but `gone` have taken a step together, and without these."""
    others = [one for one in found if one not in gone]
    here = [one.options.replica for one in others]
    wait_until(
        found, lambda: all(one.committed()[-1]["replicas"] == here for one in others), may_end=gone
    )


def text_of_refusal(found: Sequence[Replica], other: Replica) -> str:
    """Starts a further replica, which differs and ends, while `found` go on. Returns what it has
    printed."""
    other.start()
    try:
        wait_until([*found, other], lambda: any(other.codes), may_end=[other])
        text = other.text()
        assert "elastic: this replica differs" in text
        assert not other.committed()
        return text
    finally:
        other.kill()


@contextmanager
def watched(options: Options) -> Iterator[tuple[list[Replica], Lighthouse]]:
    """Replicas that train, which go on to train together after the block. Then no process has
    ended but those that the block has started again, and committed steps have the planned bits."""
    with Lighthouse() as lighthouse:
        options = replace(options, lighthouse=lighthouse.address)
        with replicas(REPLICAS, options) as found:
            all_take(found, 2)
            yield found, lighthouse
            all_take(found, 2)
    for one in found:
        pids = {line["pid"] for line in one.log()}
        assert len(pids) == one.starts
    check_as_planned(found, options.door)


def kill_at_random(
    found: Sequence[Replica], kills: int, chance: random.Random
) -> Iterator[tuple[float, float]]:
    """Kills a random rank of a random replica at a random moment, so many times, and starts that
    replica again, as its launcher would. Yields the seconds until the others have taken a step, and
    until all have."""
    for _ in range(kills):
        time.sleep(chance.uniform(0.0, 0.5))
        victim = chance.choice(found)
        begin = time.monotonic()
        victim.kill([chance.randrange(RANKS)])
        goes_on_without(found, [victim])
        without = time.monotonic() - begin
        victim.kill()
        victim.start()
        all_take(found, 2)
        yield without, time.monotonic() - begin


def time_kills(found: Sequence[Replica], kills: int, seed: int) -> None:
    """Kills at random, and prints the seconds of each kill, their median and the longest."""
    times = []
    for of_one in kill_at_random(found, kills, random.Random(seed)):
        times.append(of_one)
        print("{:.2f} s to the next step, {:.2f} s until all".format(*of_one), flush=True)
    columns = [sorted(column) for column in zip(*times, strict=True)]
    for name, choose in (("median", len(times) // 2), ("longest", -1)):
        text = "{:.2f} s to the next step, {:.2f} s until all"
        print(name, text.format(*(column[choose] for column in columns)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--door", default="fully_shard_model")
    parser.add_argument("--async-quorum", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = Options(folder, door=given.door, is_async=given.async_quorum)
        with watched(options) as (found, _):
            time_kills(found, given.kills, given.seed)
        steps = max(one.last_step for one in found) + 1
        left_out = [sum(not line["committed"] for line in one.log()) for one in found]
    print(
        f"{given.kills} kills, {steps} steps with the planned bits, attempts left out: {left_out}"
    )


if __name__ == "__main__":
    main()
