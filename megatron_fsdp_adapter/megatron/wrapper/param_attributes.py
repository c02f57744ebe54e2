"""The attributes that Megatron, and the checkpoint code, read on a parameter.

Megatron sees the sharded parameter wherever it groups, clips, reduces or names parameters, so
what it marked on the raw one has to be there too: `mark_shard` copies it. `allreduce` and
`average_gradients_across_tp_domain` decide which group a gradient is reduced over: without them a
reduction is skipped in silence.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace

from ...build.shard_attributes import mark_shard
from ...core.engine.engine import FsdpEngine
from ...core.engine.params import ParamPair
from ...core.topology import TP_DIM
from ..checkpoint.megatron_names import make_fsdp_dtensor

NO_SPLITS = SimpleNamespace(tp_dim=TP_DIM, get_submesh=make_fsdp_dtensor)
"""Answers core's own splits of fused weights, which ask for a mesh, with an error."""


def mark(pair: ParamPair, engine: FsdpEngine) -> None:
    """Sets what Megatron reads on a parameter of `engine`, sharded and unsharded."""
    raw = pair.unsharded
    param = pair.sharded
    param.__fsdp_param__ = True  # type: ignore[attr-defined]
    param.megatron_fsdp_dist_index = NO_SPLITS  # type: ignore[attr-defined]
    param.orig_param = raw  # type: ignore[attr-defined]
    for shown in (raw, param):
        shown._fsdp_engine = weakref.ref(engine)  # type: ignore[attr-defined]
    mark_shard(pair, _tp_offset(pair))


def _tp_offset(pair: ParamPair) -> tuple[int, ...] | None:
    """The start of this rank's tensor-parallel part in the whole tensor; None at the origin."""
    split = pair.managed.split
    mesh = pair.group.domain.mesh
    if split is None or mesh.mesh_dim_names[-1] != TP_DIM:  # type: ignore[index]
        return None
    shape = pair.spec.layout_shape
    part = mesh.get_local_rank(TP_DIM) * shape[split]
    return tuple(part if dim == split else 0 for dim in range(len(shape)))
