"""The domains of one wrapper: the ranks that share a parameter of a Megatron model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...core.comm.communicator import Communicator
from ...core.comm.managed import Manages
from ...core.comm.registered import zero_cta_options
from ...core.distributed_index import FSDPDistributedIndex
from ...core.duplicate_groups import duplicate_group
from ...core.topology import DENSE, EXPERT, ShardDomain
from ...quantized import stored_in
from ..options import staging_options
from ..options.rules import is_on, problems
from ..options.table import (
    CE_ALL_GATHER,
    DDP_CONFIG_RULES,
    GATHER_GROUPS,
    INSTANCES,
    engine_fields,
    expert_instances_of,
    read,
)
from .process_groups import SHARDS_AMONG, Groups, Instances, build_index, read_groups

SHARED_EMBEDDING = "dense, shared across stages"
"""The dense domain under a second name, and so a flat buffer of its own. Embedding weights that
the first and the last pipeline stage both hold are reduced between the stages shard by shard, and
their shards are equal only in a buffer that holds nothing else."""


def kind_of(param: nn.Parameter, fqn: str) -> str:
    """EXPERT or DENSE. Megatron marks expert parameters with `allreduce=False`; the name decides
    only where the attribute is absent."""
    is_dense = getattr(param, "allreduce", None)
    if is_dense is None:
        is_dense = ".experts." not in f".{fqn}"
    return DENSE if is_dense else EXPERT


def domain_name(param: nn.Parameter, fqn: str) -> str:
    """The name of the domain that shards `param`: `SHARED_EMBEDDING` for embeddings shared across
    stages, else the parameter's kind."""
    if is_on(param, "shared_embedding"):
        return SHARED_EMBEDDING
    return kind_of(param, fqn)


def grad_scale(config: Any, num_ranks: int) -> float:
    """Factor on the sum of the ranks' gradients. With per-token loss Megatron divides by the
    number of tokens itself (`scale_gradients`)."""
    if config.calculate_per_token_loss:
        return 1.0
    return 1.0 / num_ranks


def instances_of(ddp_config: Any) -> Instances:
    """The numbers of optimizer instances of a config."""
    return Instances(read(ddp_config, INSTANCES), expert_instances_of(ddp_config))


def read_index(
    module: nn.Module, config: Any, ddp_config: Any, device: torch.device, pg_collection: Any
) -> tuple[FSDPDistributedIndex | None, list[str]]:
    """The index over the process groups, or None if it cannot be made; and problems with the
    groups, or with `module` in them. Collective where the wrapper makes groups itself."""
    instances = instances_of(ddp_config)
    found: list[str] = []
    try:
        groups = read_groups(pg_collection, instances, is_on(ddp_config, GATHER_GROUPS))
        given = (groups["fsdp_group_ag"], groups["expt_fsdp_group_ag"])
        if is_on(ddp_config, CE_ALL_GATHER) and given != (None, None):
            found.append(
                f"{CE_ALL_GATHER}=True: the gather groups in pg_collection (dp_cp_ag, expt_dp_ag) "
                "use compute units. Leave them out, and the wrapper makes groups that do not"
            )
        is_right = not (found or problems(ddp_config, DDP_CONFIG_RULES))
        if device.type == "cuda" and is_right:
            _add_copy_engine_groups(groups, ddp_config)
        fields = engine_fields(ddp_config)
        shard_outer = fields["shard_outer"]
        of_experts = dict(fields.get("domain_shard_outer", ()))
        index = build_index(
            groups,
            device=device,
            grad_scale_of=functools.partial(grad_scale, config),
            instances=instances,
            shard_outer=shard_outer,
            expert_shard_outer=of_experts.get(EXPERT, shard_outer),
        )
        for kind in {kind_of(param, name) for name, param in module.named_parameters()}:
            index.domain(kind)
    except ValueError as error:
        return None, [*found, str(error)]
    return index, found


def _add_copy_engine_groups(groups: Groups, ddp_config: Any) -> None:
    """Adds groups for communication by copy engines to `groups`. Collective."""
    for kind, (role, _) in SHARDS_AMONG.items():
        for suffix in staging_options.copy_engine_roles(ddp_config, kind):
            name = f"{role}_{suffix}"
            groups[name] = duplicate_group(groups[role], name, options=zero_cta_options())


def domains_of(index: FSDPDistributedIndex, manager: Manages | None) -> dict[str, ShardDomain]:
    """The domains of the index by name, and that of embeddings shared across stages. manager:
    torchft's, which reduces over replicas that may die."""
    domains = {**index.domains, SHARED_EMBEDDING: index.domain(DENSE)}
    return {name: replace(one, manager=manager) for name, one in domains.items()}


def broadcast_left_alone(
    module: nn.Module,
    index: FSDPDistributedIndex,
    device: torch.device,
    manages: Callable[[str], bool],
) -> None:
    """Broadcasts the first rank's values of parameters that are not sharded, as was done with the
    sharded ones. manages: True for the name of a sharded parameter."""
    for name, param in module.named_parameters():
        if manages(name):
            continue
        group = index.get_dp_group(kind_of(param, name) == EXPERT)
        for tensor in stored_in(param):
            Communicator(group, device).broadcast(tensor)
