"""`doctor` under a launcher: where the ranks differ, and how fast their collectives are."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.cli import machine
from megatron_fsdp_adapter.core.runtime.comm import Communicator, Pair

TIMEOUT = timedelta(minutes=2)
NBYTES = {"cuda": 2**28, "cpu": 2**24}
"""Size of the whole buffer that is measured, by device."""
REPEATS = 5
NETWORK_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", machine.CONNECTIONS)
"""Prefixes of variables that concern communication."""


def is_launched(environment: Mapping[str, str]) -> bool:
    """True if a launcher started this process as one of several ranks."""
    return "RANK" in environment and int(environment.get("WORLD_SIZE", "1")) > 1


@contextlib.contextmanager
def joined() -> Iterator[Communicator]:
    """A communicator of all ranks on their devices, inside of a process group of all."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = machine.device()
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                            timeout=TIMEOUT)  # fmt: skip
    try:
        yield Communicator(dist.distributed_c10d._get_default_group(), device)
    finally:
        dist.destroy_process_group()


def node() -> str:
    """The node of this rank: its host, with the launcher's number, as a host may have several."""
    number = os.environ.get("GROUP_RANK")
    return socket.gethostname() + (f" (node {number})" if number is not None else "")


def facts(report: Mapping[str, Any]) -> dict[str, str]:
    """Facts that must be equal on all ranks: versions, and capabilities of the machine."""
    versions = {name: row["version"] for name, row in report["versions"].items()}
    return {name: str(value) for name, value in {**versions, **report["machine"]}.items()}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that concern communication."""
    return {name: value for name, value in sorted(environment.items())
            if name.startswith(NETWORK_VARIABLES)}  # fmt: skip


def differences(rows: Sequence[Mapping[str, str]], nodes: Sequence[str]) -> list[str]:
    """A line for each name whose value is not the same on all ranks: that of most ranks, and the
    first rank with each other one. rows, nodes: of each rank."""
    lines = []
    for name in dict.fromkeys(itertools.chain(*rows)):
        values = [row.get(name, "absent") for row in rows]
        (usual, most), *others = Counter(values).most_common()
        unlike = [
            f"{value} on rank {rank} ({nodes[rank]})" + (f" and {count - 1} more" * (count > 1))
            for value, count in others for rank in [values.index(value)]
        ]  # fmt: skip
        if unlike:
            lines.append(f"{name}: {usual} on {most} of {len(rows)} ranks, {', '.join(unlike)}")
    return lines


def groups_of(nodes: Sequence[str]) -> dict[str, list[list[int]]]:
    """Groups of ranks that communicate: all; with several nodes also those of each, and those with
    the same place in each, as shards and replicas of HSDP do."""
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(nodes):
        members.setdefault(name, []).append(rank)
    found = {"all ranks": [list(range(len(nodes)))]}
    if len(members) > 1:
        places = itertools.zip_longest(*members.values())
        found["inside a node"] = list(members.values())
        found["between nodes"] = [[r for r in place if r is not None] for place in places]
    return {name: groups for name, groups in found.items() if max(map(len, groups)) > 1}


def bandwidths(nodes: Sequence[str], world: Communicator) -> list[dict[str, Any]]:
    """A row for each kind of group: GB/s that a rank receives, in the slowest group. All groups of
    a kind communicate at a time. Collective."""
    rows = []
    for name, groups in groups_of(nodes).items():
        made = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in groups]
        [own] = [group for group, ranks in zip(made, groups, strict=True)
                 if dist.get_rank() in ranks]  # fmt: skip
        own_speed = _reached(Communicator(own, world.device), NBYTES[world.device.type])
        reached = world.all_objects(own_speed).values()
        slowest = {kind: min(one[kind] for one in reached) for kind in own_speed}
        rows.append({"among": name, "ranks": max(map(len, groups)), **slowest})
    return rows


def _reached(comm: Communicator, nbytes: int) -> dict[str, float]:
    """GB/s of this rank for each collective. A group of one rank is as fast as it gets."""
    part = torch.zeros(nbytes // 4 // comm.size, device=comm.device)
    whole = torch.zeros(part.numel() * comm.size, device=comm.device)
    received = 4 * (whole.numel() - part.numel()) / 1e9
    pairs = {"all_gather": (whole, part), "reduce_scatter": (part, whole)}
    return {
        kind: received / _seconds(comm, kind, pair) if comm.size > 1 else float("inf")
        for kind, pair in pairs.items()
    }


def _seconds(comm: Communicator, kind: str, pair: Pair) -> float:
    """The shortest of some calls, after one that makes connections."""
    synchronize, taken = getattr(torch, comm.device.type).synchronize, []
    for _ in range(REPEATS + 1):
        synchronize()
        started = time.perf_counter()
        for handle in comm.launch(kind, [pair]):
            handle.wait()
        synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """The text of what the ranks are together."""
    lines = [f"ranks: {len(found['nodes'])}, nodes: {len(set(found['nodes']))}"]
    for name in ("differ", "variables differ"):
        lines += [f"  {name}: {line}" for line in found[name] or ["nothing"]]
    if isinstance(found["GB/s"], str):
        return [*lines, f"bandwidth: {found['GB/s']}"]
    lines.append("bandwidth, GB/s that a rank receives, in the slowest group")
    return lines + [
        f"  {row['among']:<14} {row['ranks']:>4} ranks   all-gather {row['all_gather']:7.2f}   "
        f"reduce-scatter {row['reduce_scatter']:7.2f}"
        for row in found["GB/s"]
    ]
