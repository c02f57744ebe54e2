"""Optimizer state under a checkpoint's names, and back.

For `fsdp_dtensor` Megatron's `DistributedOptimizer` emits two dicts by parameter name: "state", and
"param_to_group_meta" with the options of the parameter's group. Here the names are those of the
whole model. Where a parameter is saved in halves, its optimizer state is cut in the same way. The
step count has not the parameter's geometry and is not cut: both halves have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def parameter_names(chunks: ModelChunks) -> tuple[dict[Any, str], frozenset[str]]:
    """The names that the chunks' sharded parameters have in the whole model, and the set of those
    names whose parameters are saved in halves.

    A name that two chunks share is an error elsewhere: where their weights are merged
    (`checkpoint.training`)."""
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


def split_halves(state: ByName, params: Mapping[str, Any], halved: frozenset[str]) -> ByName:
    """State by name, with two entries where the parameter is saved in halves.

    params: the sharded parameters by name. halved: the names of those saved in halves. Halves of a
    tensor are views of it.
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
                if isinstance(value, DTensor):  # else the step count, which both halves have
                    value = part_of(value, ref, number, len(HALVES))
                half[field] = value
            cut[name + suffix] = half
    return cut


def join_halves(
    state: ByName,
    own: ByName,
    params: Mapping[str, Any],
    halved: frozenset[str],
) -> ByName:
    """State by name, joined from what `split_halves` returned or from a load of it.

    own: the optimizer's present state by name. It tells which fields have the parameter's geometry
    and how they are sharded. Where both halves are views of its tensor, that tensor is the result,
    and nothing is copied.

    Raises:
        ValueError: a parameter has only one half; a field is in one half only; in place of a
            sharded tensor a half is no DTensor, or its shard has another shape than here.
    """
    whole = {name: dict(entry) for name, entry in state.items() if not _is_half(name, halved)}
    for name in halved:
        first, second = (state.get(name + suffix) for suffix in HALVES)
        if first is None and second is None:
            continue
        if first is None or second is None:
            raise ValueError(f"optimizer state of {name}: one of {HALVES} is missing")
        if first.keys() != second.keys():
            raise ValueError(
                f"optimizer state of {name}: one of {HALVES} has no "
                f"{sorted(first.keys() ^ second.keys())}. Load a checkpoint that has the same "
                "state of both halves"
            )
        whole[name] = {
            field: _join_field(name, field, (value, second[field]), own[name], params[name])
            for field, value in first.items()
        }
    return whole


def _is_half(name: str, halved: frozenset[str]) -> bool:
    return any(name.endswith(suffix) and name.removesuffix(suffix) in halved for suffix in HALVES)


def _join_field(
    name: str, field: str, parts: tuple[Any, Any], own: Mapping[str, Any], param: Any
) -> Any:
    target = own.get(field)
    if not isinstance(target, DTensor):  # the step count, of which both halves have a copy
        return parts[0]
    if not all(isinstance(part, DTensor) for part in parts):
        raise ValueError(
            f"optimizer state {field} of {name}: halves must be DTensors sharded like the state, "
            f"not {[type(part).__name__ for part in parts]}"
        )
    return join_parts(target, param.fsdp_layout_ref, parts)


def with_one_count(meta: ByName) -> ByName:
    """Group options by parameter name, where all step counts are the largest one.

    All groups of an optimizer of Megatron take every step, but there are checkpoints with different
    counts. A fused Adam does not count steps of a group without parameters, so a rank that holds
    none of a group's parameters saved a count of 0. Rank 0 prints a line about different counts."""
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
