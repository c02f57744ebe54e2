"""The facts that replicas must have in common. Shards of a replica that differs would be added up
with those of other parameters, or not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .. import __version__
from ..core.comm.managed import ReplicaRefused
from ..core.engine.engine import FsdpEngine

_own: dict[str, str] = {}
"""The facts of this process; empty in one that trains no replica."""


def set_own_facts(facts: Mapping[str, str]) -> None:
    """Makes `facts` those of this process, with which received ones are compared."""
    _own.clear()
    _own.update(facts)


def raise_differences(theirs: Mapping[str, str]) -> None:
    """ReplicaRefused if facts of another replica are not those of this process."""
    lines = []
    for name in sorted({*theirs, *_own}):
        mine, other = _own.get(name, "none"), theirs.get(name, "none")
        if mine != other:
            lines.append(f"  - {name}: {mine} here, {other} there")
    if lines:
        raise ReplicaRefused(
            "elastic: this replica differs from the one whose state it is to take:\n"
            + "\n".join(lines)
            + "\nStart all replicas with the same model, options and versions"
        )


class Facts(dict[str, str]):
    """Facts that are compared with those of a process as soon as this receives and unpickles them.

    So a replica that differs is refused before it takes part in a reduction. torchft loads what a
    replica received only after the backward, if the quorum runs beside it."""

    def __reduce__(self) -> Any:
        return _received, (dict(self),)


def _received(theirs: Mapping[str, str]) -> Facts:
    if _own:
        raise_differences(theirs)
    return Facts(theirs)


def facts_of(engines: list[FsdpEngine], optimizer: torch.optim.Optimizer) -> Facts:
    """The facts of this rank's part of a replica."""
    facts = Facts()
    facts["megatron_fsdp_adapter"] = __version__
    facts["torch"] = torch.__version__
    kinds = [sorted(group.keys() - {"params"}) for group in optimizer.param_groups]
    facts["optimizer"] = type(optimizer).__name__
    facts["options of parameter groups"] = _digest(kinds)
    for number, engine in enumerate(engines):
        config = replace(engine.config, poison_buffers=False)
        lines = []
        for group in engine.groups:
            entries = [(one.fqns, tuple(one.param.shape)) for one in group.managed]
            held = group.shards.held
            shards = (held.rank, held.layout.num_shards, held.layout.total_numel)
            lines.append((group.name, group.key, entries, shards))
        facts[f"options of model {number}"] = repr(config)
        scales = sorted({group.domain.grad_scale for group in engine.groups})
        facts[f"gradient scales of model {number}"] = repr(scales)
        facts[f"parameters and shards of model {number}"] = _digest(lines)
    return facts


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
