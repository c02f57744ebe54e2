"""One chunk of a Megatron model as an export sees it: names in the whole model, and how tensor,
expert and pipeline parallelism split it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ...core.distributed_index import FSDPDistributedIndex
from ...core.engine.engine import FsdpEngine
from ...core.engine.params import ParamPair
from ...core.topology import EXPERT
from ...rollout.export_source import Described, Source, beside_engine
from ...state.names import global_names, split_depth
from ..options.rules import is_on
from .domains import kind_of
from .process_groups import group_named


def export_source(
    module: nn.Module, engine: FsdpEngine, index: FSDPDistributedIndex, pg_collection: Any
) -> Source:
    """The source of an export of `module`, which is inside of both wrappers.

    pg_collection: the process groups; None for those of `parallel_state`. ValueError for a layer
    whose tensor-parallel parts cannot be joined."""
    names = global_names(module)
    experts = group_named(pg_collection, "ep")
    stages = group_named(pg_collection, "pp")
    # The first stage has the embedding. Later stages have copies of it, for a tied output layer or
    # for multi-token prediction.
    is_later_stage = stages is not None and dist.get_rank(stages) > 0

    def described(fqn: str, param: Any) -> Described:
        kind = kind_of(param, fqn)
        group = index.tensor_groups[kind]
        split = getattr(param, "_tp_partition_dim", None)
        is_split = split is not None and group is not None and dist.get_world_size(group) > 1
        if is_split and names.is_interleaved(fqn):
            raise ValueError(
                f"{fqn}: its tensor-parallel slices do not join into one tensor. Use "
                "tensor_model_parallel_size=1 to export this kind of layer"
            )
        return Described(
            name=split_depth(names.of(fqn))[1],
            split=split,
            tensor=group,
            halves=len(names.suffixes(fqn)),
            expert=kind == EXPERT,
            is_copy=is_later_stage and is_on(param, "shared_embedding"),
        )

    def of_pair(pair: ParamPair) -> Described:
        return described(pair.managed.fqns[0], pair.unsharded)

    rest = []
    for fqn, value, is_buffer in beside_engine(module, engine):
        if is_buffer:
            of_value = Described(split_depth(names.of(fqn))[1], is_buffer=True)
        else:
            of_value = described(fqn, value)
        rest.append((of_value, value))
    return Source(engine, of_pair, rest, experts, stages)
