"""Refusals of an elastic run, whose jobs are replicas that may die and come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..core.config import EngineConfig
from ..core.engine.partition import UnitPlan
from ..core.topology import Domains

SPLIT_STATE = (
    "optimizer state would be split over replicas, so a replica that dies takes a part along"
)

METHODS = (
    "allreduce",
    "errored",
    "register_state_dict_fn",
    "should_commit",
    "start_quorum",
    "wait_quorum",
)
"""Methods of torchft's `Manager` that are called here."""


def check_manager(manager: Any) -> None:
    """ValueError for an `elastic` that is no manager of torchft's; None is none at all."""
    if manager is None:
        return
    missing = [name for name in METHODS if not callable(getattr(manager, name, None))]
    if missing:
        raise ValueError(
            f"elastic={manager!r}: has no methods {missing}. Pass a torchft.Manager, of "
            "megatron-fsdp-adapter[elastic]"
        )


def replica_problems(
    plans: Sequence[UnitPlan], domains: Domains, config: EngineConfig
) -> Iterator[str]:
    """Problems of a model that is trained by replicas of torchft's; none without a manager."""
    if all(domain.manager is None for domain in domains.values()):
        return
    if config.offload:
        yield (
            "elastic with main weights in host memory: a step moves them and optimizer state, "
            "which a replica that joins reads meanwhile. Use "
            "chunked_optimizer_state_offload=False, or leave out fully_shard_optimizer"
        )
    quantized = []
    for plan in plans:
        for key, managed in plan.groups.items():
            if key.quantized is not None:
                quantized += [entry.fqns[0] for entry in managed]
    if quantized:
        yield (
            f"elastic with quantized weights, {quantized[:4]} of {len(quantized)}: replicas would "
            "have other scales. Use weights in bfloat16"
        )
