"""`doctor` under a launcher: where the ranks differ."""

from __future__ import annotations

import itertools
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

from megatron_fsdp_adapter.tools.cli import machine

from .output import Report

NETWORK_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", machine.CONNECTIONS)
"""Prefixes of variables that concern communication."""


def is_launched(environment: Mapping[str, str]) -> bool:
    """True if a launcher started this process as one of several ranks."""
    return "RANK" in environment and int(environment.get("WORLD_SIZE", "1")) > 1


def node() -> str:
    """The node of this rank: its host, with the launcher's number, as a host may have several."""
    host = socket.gethostname()
    number = os.environ.get("GROUP_RANK")
    if number is None:
        return host
    return f"{host} (node {number})"


def facts(report: Report) -> dict[str, str]:
    """Facts that must be equal on all ranks: versions, and capabilities of the machine."""
    found = {name: row["version"] for name, row in report["versions"].items()}
    found |= report["machine"]
    return {name: str(value) for name, value in found.items()}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that concern communication."""
    names = [name for name in sorted(environment) if name.startswith(NETWORK_VARIABLES)]
    return {name: environment[name] for name in names}


def differences(rows: Sequence[Mapping[str, str]], nodes: Sequence[str]) -> list[str]:
    """A line for each name whose value is not the same on all ranks: the value of most ranks, and
    each other value with the first rank that has it. rows: values of each rank; nodes: its node."""
    lines = []
    for name in dict.fromkeys(itertools.chain(*rows)):
        values = [row.get(name, "absent") for row in rows]
        (usual, most), *others = Counter(values).most_common()
        unlike = []
        for value, count in others:
            rank = values.index(value)
            more = f" and {count - 1} more" if count > 1 else ""
            unlike.append(f"{value} on rank {rank} ({nodes[rank]}){more}")
        if unlike:
            lines.append(f"{name}: {usual} on {most} of {len(rows)} ranks, {', '.join(unlike)}")
    return lines


def lines_of(found: Report) -> list[str]:
    """The report's lines about all ranks: how many there are, and where they differ."""
    nodes = found["nodes"]
    lines = [f"ranks: {len(nodes)}, nodes: {len(set(nodes))}"]
    for name in ("differ", "variables differ"):
        lines += [f"  {name}: {line}" for line in found[name] or ["nothing"]]
    return lines
