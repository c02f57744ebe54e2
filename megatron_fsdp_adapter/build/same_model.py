"""Checks whether all ranks that share a model's weights have built the same model.

Ranks whose models differ launch collectives of other sizes, or in another order: they hang, or add
up gradients of other parameters. Units, parameters and the engine's options decide the collectives,
so these are compared, in order. Each rank sends a digest; the whole text only if digests differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ..core.config import EngineConfig
from ..core.engine.partition import GroupKey, ManagedParam, UnitPlan
from ..core.topology import Domains


def model_lines(plans: Sequence[UnitPlan], config: EngineConfig) -> list[str]:
    """Lines that must be equal on all ranks: one for each option, unit and parameter."""
    options = {**vars(config), "strategy": config.strategies_named}
    del options["domain_strategies"]
    lines = [f"option {name}={value}" for name, value in options.items()]
    for plan in plans:
        own = "" if plan.strategy is None else f", {plan.strategy.name}"
        lines.append(f"unit {plan.name}{own}")
        params = []
        names = []
        for key, managed in plan.groups.items():
            for entry in managed:
                params.append(_param_line(key, entry))
                names.append(entry.fqns[0])
        # By name: a parameter that differs is then reported as such, not as a missing one.
        lines += sorted(params)
        order = ", ".join(names)
        lines.append(f"unit {plan.name} in the order {order}")
    return lines


def _param_line(key: GroupKey, entry: ManagedParam) -> str:
    names = " = ".join(entry.fqns)
    shape = tuple(entry.param.shape)
    state = "trained" if key.requires_grad else "frozen"
    return (
        f"parameter {names} {shape} {key.represented} {state}, "
        f"{key.domain}, gradient by {entry.writer.value}"
    )


def comparing_groups(domains: Domains) -> list[dist.ProcessGroup]:
    """This rank's groups of more than one rank with which it shares weights, each once."""
    found: dict[int, dist.ProcessGroup] = {}
    for domain in domains.values():
        groups = [domain.reduce_group]
        if domain.outer:
            groups.append(domain.outer.group)
        for group in groups:
            if dist.get_world_size(group) > 1:
                found.setdefault(id(group), group)
    return list(found.values())


def _exchange(value: Any, group: dist.ProcessGroup) -> list[Any]:
    # The values of all ranks of `group`, in its order.
    ranks = dist.get_process_group_ranks(group)
    everyone: list[Any] = [None] * len(ranks)
    try:
        dist.all_gather_object(everyone, value, group=group)
    except RuntimeError as error:
        if "Duplicate GPU" in str(error):
            raise RuntimeError(
                f"cuda:{torch.cuda.current_device()} is the current device of rank "
                f"{dist.get_rank()} and of another one. Call torch.cuda.set_device, with another "
                "GPU in each process, before the model is sharded"
            ) from error
        raise RuntimeError(
            f"rank {dist.get_rank()}: comparing the models of ranks {ranks}, before they are "
            f"sharded, failed: {error}. See the logs of the other ranks: one has failed, or did "
            "not arrive within the timeout of the process group"
        ) from error
    return everyone


def _first_difference(texts: Mapping[int, Sequence[str]]) -> str:
    """The first line in which a rank differs from the first one of `texts` (rank -> lines)."""
    first = next(iter(texts))
    for number, lines in enumerate(zip_longest(*texts.values(), fillvalue="nothing more")):
        for rank, line in zip(texts, lines, strict=True):
            if line != lines[0]:
                return f"place {number}: rank {first} has {lines[0]!r}, rank {rank} has {line!r}"
    raise AssertionError("equal texts have no first difference")


def first_difference(lines: Sequence[str], groups: Sequence[dist.ProcessGroup]) -> str | None:
    """The first difference between the models; None if there is none. Collective.

    Compares in one group after the other. A difference that was found in one group is passed on in
    the next, so that no rank goes on to shard with ranks that have given up.
    """
    text = "\n".join(lines)
    digest = hashlib.sha256(text.encode()).hexdigest()
    found: str | None = None
    for group in groups:
        everyone = _exchange((digest, found), group)
        found = next((other for _, other in everyone if other is not None), None)
        digests = {own for own, _ in everyone}
        if found is None and len(digests) > 1:
            texts = _exchange(list(lines), group)
            ranks = dist.get_process_group_ranks(group)
            found = _first_difference(dict(zip(ranks, texts, strict=True)))
    return found


def verify_same_model(
    subject: str,
    plans: Sequence[UnitPlan],
    config: EngineConfig,
    domains: Domains,
) -> None:
    """Checks that the ranks' models are the same. Collective over the groups of `domains`.

    Raises:
        ValueError: on every rank, with the first difference between the models.
        RuntimeError: a rank has failed, or did not answer within the timeout of its process group.
    """
    raise_if_different(subject, model_lines(plans, config), comparing_groups(domains))


def raise_if_different(
    subject: str, lines: Sequence[str], groups: Sequence[dist.ProcessGroup]
) -> None:
    """Checks that `lines`, which describe a model, are the same on all ranks of `groups`.
    Collective. Raises as `verify_same_model`."""
    found = first_difference(lines, groups)
    if found is not None:
        raise ValueError(
            f"{subject}: the ranks' models differ, first at {found}. Build the same model, with "
            "the same options, on all ranks that share its weights"
        )
