"""The gathers of a unit's groups, one launch for each domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_fsdp_adapter.core.comm.communicator import Communicator, Pair

from .group import ParamGroup, by_domain
from .launches import GATHERED


class DomainGather(NamedTuple):
    """The gathers of one domain over one axis, in one launch."""

    # What the launch is called (`launches.py`).
    kind: str
    # Of the domain's ranks on that axis.
    communicator: Communicator
    # Whose weights are gathered.
    groups: Sequence[ParamGroup]
    # Output and input of each gather.
    pairs: Sequence[Pair]
    # Weights of groups that say at each gather what else is gathered (`extensions.py`).
    asked: Sequence[Any]


PairsOf = Callable[[ParamGroup], Sequence[Pair]]


def domain_gathers(
    kind: str,
    communicators: Mapping[str, Communicator],
    groups: Sequence[ParamGroup],
    pairs_of: PairsOf,
) -> list[DomainGather]:
    """The gathers of `groups` over one axis: one for each domain with anything to gather."""
    found = []
    for domain, members in by_domain(groups).items():
        pairs = [pair for group in members for pair in pairs_of(group)]
        asked = [group.weights for group in members if group.key.extended]
        asked = asked if kind == GATHERED else []
        if pairs or asked:
            found.append(DomainGather(kind, communicators[domain], members, pairs, asked))
    return found
