"""Optimizer state under a checkpoint's names, and back.

Megatron's `DistributedOptimizer` emits, for `fsdp_dtensor`, a dict "state" by parameter name and a
dict "param_to_group_meta" of the options of each parameter's group. The names given to it here
are those of the whole model; what the optimizer keeps for a parameter that is saved in halves is
cut like the parameter. The step count is no tensor of the parameter's geometry, and both halves
have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ...core.dtensor.parts import join_parts, part_of
from ...optim.state import COUNT
from ...state.names import HALVES, GlobalNames, global_names
from ..inner_module import ModelChunks

STATE = "state"
META = "param_to_group_meta"

ByName = Mapping[str, Mapping[str, Any]]
"""State or options of each parameter, by the parameter's name."""

OF_THIS_SPLIT = ("is_expert_parallel",)
"""Options of a parameter group that describe how this run splits the model. A load leaves them
alone: expert parameters are marked so only under expert parallelism, and one that is loaded into a
run with another kind would be in a group that is not its own."""


def parameter_names(chunks: ModelChunks) -> tuple[dict[Any, str], frozenset[str]]:
    """Names of all sharded parameters of the model chunks, as in the whole model, and those of them
    whose parameters are saved in halves. Two chunks with one name are found where their weights are
    merged (`checkpoint.training`)."""
    named: dict[Any, str] = {}
    halved: set[str] = set()
    for chunk in chunks:
        chunk.engine.to_sharded()
        names: GlobalNames = global_names(chunk)
        for local, param in chunk.named_parameters():
            name = names.of(local)
            named[param] = name
            if names.suffixes(local) == HALVES:
                halved.add(name)
    return named, frozenset(halved)


def in_pieces(state: ByName, params: Mapping[str, Any], halved: frozenset[str]) -> ByName:
    """State by name, with two entries where the parameter is saved in halves.

    params: the sharded parameters by name. Pieces are views of the optimizer's own tensors.
    """
    cut: dict[str, dict[str, Any]] = {}
    for name, entry in state.items():
        if name not in halved:
            cut[name] = dict(entry)
            continue
        ref = params[name].fsdp_layout_ref
        for number, suffix in enumerate(HALVES):
            half = {}
            for field, value in entry.items():
                if isinstance(value, DTensor):
                    value = part_of(value, ref, number, len(HALVES))
                half[field] = value
            cut[name + suffix] = half
    return cut


def joined(
    state: ByName,
    own: ByName,
    params: Mapping[str, Any],
    halved: frozenset[str],
) -> ByName:
    """Joins what `in_pieces` made, or a load of it, by name again. own: the optimizer's state by
    name; its tensors are taken where the pieces are views of them, so that nothing is copied.

    Raises ValueError naming what has only one of its halves, or one that is no DTensor.
    """
    whole = {name: dict(entry) for name, entry in state.items() if not _is_half(name, halved)}
    for name in halved:
        first, second = (state.get(name + suffix) for suffix in HALVES)
        if first is None and second is None:
            continue
        if first is None or second is None:
            raise ValueError(f"optimizer state of {name}: one of {HALVES} is missing")
        whole[name] = {
            field: _joined_value(name, field, (value, second[field]), own[name], params[name])
            for field, value in first.items()
        }
    return whole


def _is_half(name: str, halved: frozenset[str]) -> bool:
    return any(name.endswith(suffix) and name.removesuffix(suffix) in halved for suffix in HALVES)


def _joined_value(
    name: str, field: str, parts: tuple[Any, Any], own: Mapping[str, Any], param: Any
) -> Any:
    target = own.get(field)
    if not isinstance(target, DTensor):
        return parts[0]
    if not all(isinstance(part, DTensor) for part in parts):
        raise ValueError(
            f"optimizer state {field} of {name}: halves must be DTensors sharded like the state, "
            f"not {[type(part).__name__ for part in parts]}"
        )
    return join_parts(target, param.fsdp_layout_ref, parts)


def with_one_count(meta: ByName) -> ByName:
    """Group options by parameter name, with the largest count of steps for all that have one.

    All groups of one of Megatron's optimizers take every step. Checkpoints in which their counts
    differ exist: with a fused Adam that counts no step of a group without parameters, ranks that
    hold nothing of a group save that it has taken none."""
    result = {name: dict(options) for name, options in meta.items()}
    counts = {int(options[COUNT]) for options in result.values() if COUNT in options}
    if len(counts) < 2:
        return result
    most = max(counts)
    if dist.get_rank() == 0:
        print(
            "optimizer state: parameter groups were saved with different step counts "
            f"{sorted(counts)}. They continue with {most}",
            flush=True,
        )
    for options in result.values():
        if COUNT in options:
            options[COUNT] = most
    return result


def with_own_split(
    meta: ByName,
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[torch.Tensor, str],
) -> ByName:
    """Group options by parameter name, with `OF_THIS_SPLIT` as the optimizer's groups have it."""
    result = {name: dict(options) for name, options in meta.items()}
    for group in groups:
        for param in group["params"]:
            options = result.get(names[param])
            if options is None:
                continue
            options.update({key: group[key] for key in OF_THIS_SPLIT if key in group})
    return result
