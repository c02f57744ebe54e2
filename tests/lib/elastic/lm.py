"""Replicas of Megatron-LM's pretrain_gpt.py, each a job of its own, which are killed and started
again. Committed steps are compared with a run whose steps have the same replicas by plan.

    MEGATRON_LM_PATH=path/to/Megatron-LM python -m tests.lib.elastic.lm --kills 10
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from tests.lib.elastic.replica import RANKS, Options
from tests.lib.elastic.run import Lighthouse, Replica, all_take, running, wait_until
from tests.lib.elastic.watched import REPLICAS, time_kills
from tests.lib.integration.lm_runs import (
    NO_KERNELS,
    SMALL,
    end_servers,
    environment_of_ranks,
    server_of,
)
from tests.lib.integration.warm_start import Rank
from tests.lib.ranks.ranks import rendezvous

HARNESS = "elastic_on_cpu.py"
STEPS = 5000
"""More than a test waits for."""
JOIN_TIMEOUT_MS = 5000
"""Longer than a step, so that a replica that waits leaves none behind that is in one."""
ELASTIC = shlex.split(
    f"--mock-data --use-megatron-fsdp --fsdp-elastic-replicas {REPLICAS} --eval-interval 1000 "
    f"--lr-decay-iters {STEPS} --hidden-dropout 0.1 --train-iters"
)
"""Flags of each replica. Dropout draws random numbers."""

Plan = list[list[int]]
"""For each step the numbers of the replicas, in the order of their ranks."""


@dataclass
class LmOptions(Options):
    """What a replica of pretrain_gpt.py is started with."""

    # Megatron-LM.
    checkout: Path = Path()
    # Further flags.
    flags: str = ""
    # Folders of checkpoints of each replica, which are saved every 10 steps; none are without.
    roots: Sequence[Path] = ()
    # The number of a replica, and the bytes that its files may have.
    file_limit: tuple[int, int] | None = None
    # A folder of code that this package has beside its own, as of another commit.
    further_code: str = ""
    # Of a run without torchft, and the port of the store in which its replicas meet.
    plan: Plan | None = None
    store: int = 0
    # Longer than a step takes on a machine that does other things.
    timeout_s: float = 10.0


class _Process(Rank):
    """A rank, as `multiprocessing` has it."""

    def join(self) -> None:
        self.wait()

    @property
    def exitcode(self) -> int | None:
        return self.poll()


class LmReplica(Replica):
    """The ranks of a replica of pretrain_gpt.py."""

    options: LmOptions

    def start(self) -> None:
        options = self.options
        script = options.checkout / "pretrain_gpt.py"
        server = server_of(HARNESS, script.parent)
        meeting = contextlib.ExitStack()
        shared = {**environment_of_ranks(), **meeting.enter_context(rendezvous(RANKS))}
        shared["RUST_LOG"] = "error"
        cache = ["--data-cache-path", f"{options.folder}/cache{options.replica}"]
        words = [*SMALL, *NO_KERNELS, *ELASTIC, str(options.steps), *cache]
        words += ["--fsdp-elastic", options.lighthouse, *shlex.split(options.flags)]
        if options.roots and options.plan is None:
            root = options.roots[options.replica]
            words += ["--save", str(root), "--load", str(root), "--save-interval", "10"]
        self.starts += 1
        self.processes = []
        limit = 0
        if options.file_limit is not None and options.file_limit[0] == options.replica:
            limit = options.file_limit[1]
        for rank in range(RANKS):
            told = {
                "log": f"{options.folder}/{options.replica}.{rank}.jsonl",
                "replica": options.replica,
                "rank": rank,
                "ranks": RANKS,
                "pause_s": options.pause_s,
                "timeout_s": options.timeout_s,
                "file_limit": limit,
                "further_code": options.further_code,
                "plan": options.plan or [],
                "store": options.store,
                "replicas": REPLICAS,
            }
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment["ELASTIC_RANK"] = json.dumps(told)
            text = Path(options.folder, f"{options.replica}.{rank}.txt")
            text.touch()
            self.processes.append(
                _Process(server, [str(script), *words], environment, text, meeting)
            )


@contextlib.contextmanager
def lm_replicas(count: int, options: LmOptions) -> Iterator[list[LmReplica]]:
    """That many replicas, which are started; killed at the end of the block."""
    found = [LmReplica(replace(options, replica=number)) for number in range(count)]
    with running(found):
        yield found


def plan_of(found: Sequence[Replica]) -> Plan:
    """The replicas of each committed step, on which all that have committed it agree. Samples are
    taken in order: none is missing, none comes twice."""
    by_step: dict[int, tuple[list[int], int]] = {}
    for one in found:
        for rank in range(RANKS):
            for line in one.committed(rank):
                mine = (line["order"], line["consumed"])
                assert by_step.setdefault(line["step"], mine) == mine, line
    assert sorted(by_step) == list(range(len(by_step)))
    consumed = 0
    for step in range(len(by_step)):
        order, begin = by_step[step]
        assert begin == consumed
        consumed += 4 * len(order)  # the global batch of `SMALL`
    return [by_step[step][0] for step in range(len(by_step))]


def check_as_planned(found: Sequence[LmReplica]) -> None:
    """Each committed step of each replica has the loss, weights and learning rate of the run with
    the same replicas by plan."""
    plan = plan_of(found)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        options = replace(
            found[0].options,
            folder=folder,
            lighthouse="planned:1",
            plan=plan,
            store=store.port,
            pause_s=0.0,
            flags=f"{found[0].options.flags} --exit-interval {len(plan)}",
        )
        with lm_replicas(REPLICAS, options) as planned:
            seconds = 300.0 + 2.0 * len(plan)
            wait_until(planned, lambda: all(None not in one.codes for one in planned), seconds)
            for one, other in zip(found, planned, strict=True):
                for rank in range(RANKS):
                    expected = {line["step"]: line for line in other.committed(rank)}
                    assert len(expected) == len(plan)
                    for line in one.committed(rank):
                        for name in ("loss", "weights", "learning rate"):
                            assert line[name] == expected[line["step"]][name], (name, line)


@contextlib.contextmanager
def watched(
    options: LmOptions, join_timeout_ms: int = JOIN_TIMEOUT_MS
) -> Iterator[tuple[list[LmReplica], Lighthouse]]:
    """Replicas that train, which go on to train together after the block. Then no process has
    ended but those that the block has started again, and committed steps are as planned."""
    with Lighthouse(join_timeout_ms) as lighthouse:
        address = lighthouse.address.removeprefix("http://")
        options = replace(options, lighthouse=address, steps=STEPS)
        with lm_replicas(REPLICAS, options) as found:
            all_take(found, 2)
            yield found, lighthouse
            all_take(found, 2)
    for one in found:
        assert len({line["pid"] for line in one.log()}) == one.starts
    check_as_planned(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="a file for the committed steps")
    given = parser.parse_args()
    checkout = Path(os.environ["MEGATRON_LM_PATH"])
    with tempfile.TemporaryDirectory() as folder:
        options = LmOptions(folder, checkout=checkout)
        with watched(options) as (found, _):
            time_kills(found, given.kills, given.seed)
        steps = max(one.last_step for one in found) + 1
        left_out = [sum(not line["committed"] for line in one.log()) for one in found]
        if given.record:
            given.record.write_text(json.dumps([one.log() for one in found]))
    print(f"{given.kills} kills, {steps} steps as planned, attempts repeated: {left_out}")
    end_servers()


if __name__ == "__main__":
    main()
