"""Gathers whole values of sharded parameters, ours and those that stock DDP's distributed optimizer
splits, for comparison with an unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.checkpoint.names import split_depth
from megatron_fsdp_adapter.dtensor import known_chunks
from tests.distributed.groups import everyones

Named = Sequence[tuple[str, Any]]
"""(name, pair of unsharded and sharded parameter of the engine)."""


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    return split_depth(name)[1]


def shard_groups(group: Any) -> tuple[Any, ...]:
    """The process groups over which a parameter group is sharded, the finest split first."""
    groups = [group.domain.outer.group] if group.splits_outer else []
    if group.config.strategy.shard_main:
        groups.append(group.domain.axis.group)
    return tuple(groups)


def full_values(
    named: Named, local_of: Callable[[Any], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Name -> whole value, gathered from `local_of(pair)` of all ranks.

    Collective over data-parallel ranks. The pieces are exchanged in host memory, because a pickled
    device tensor would arrive on the sender's device."""
    by_groups: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
    for name, pair in named:
        mine = by_groups.setdefault(shard_groups(pair.group), {})
        mine[name] = local_of(pair).cpu().reshape(-1)
    found: dict[str, torch.Tensor] = {}
    # A stage may lack a domain, but all ranks of a domain's groups are in one stage.
    for groups, mine in by_groups.items():
        for group in groups:
            pieces = everyones(mine, group)
            mine = {name: torch.cat([piece[name] for piece in pieces]) for name in mine}
        found |= mine
    return {
        name: found[name].to(pair.sharded.device).view(pair.unsharded.shape)
        for name, pair in named
    }


def whole_tensors(values: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
    """What `DTensor.full_tensor` gives of each, by name. Its blocks are added up as there, but
    those of all that are split over the same ranks at once, which takes a tenth of the time."""
    by_groups: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}
    for name, value in values.items():
        whole = value._local_tensor.detach()
        mesh, placements = value.device_mesh, value.placements
        groups = [mesh.get_group(n) for n, p in enumerate(placements) if not p.is_replicate()]
        if groups:
            local, device = whole.contiguous(), mesh.device_type
            whole = torch.zeros(tuple(value.shape), dtype=local.dtype, device=device)
            known_chunks(value).put_into(whole, local.to(device))
        by_groups.setdefault(tuple(groups), {})[name] = whole
    for groups, found in by_groups.items():
        add_up(list(found.values()) if groups else [], groups)
    return {name: found[name] for found in by_groups.values() for name in found}


def add_up(tensors: Sequence[torch.Tensor], groups: Iterable[Any]) -> None:
    """Adds tensors, of which other ranks have zeros where this one has values, up over each group,
    byte by byte; collective."""
    parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    if not parts:
        return
    together = torch.cat(parts)
    for group in groups:
        dist.all_reduce(together, group=group)
    for part, found in zip(parts, together.split([len(part) for part in parts]), strict=True):
        part.copy_(found)


# What stock DDP's distributed optimizer splits.


def optimizers_of(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def main_piece(param: Any, rows: slice) -> torch.Tensor:
    """A float32 parameter is its own main weight."""
    main = getattr(param, "main_param", None)
    return param.detach().view(-1)[rows] if main is None else main


def pieces_of(optimizer: Any) -> Mapping[int, slice]:
    """By the id of a parameter, the range of it, flat, that this rank's optimizer steps."""
    pieces = {}
    for one in optimizers_of(optimizer):
        for param in getattr(one, "model_param_gbuf_map", ()):
            held = one._get_model_param_range_map(param)["param"]
            pieces[id(param)] = slice(held.start, held.end)
    return pieces


def put_together(
    named: Iterable[tuple[str, Any]], optimizer: Any,
    piece_of: Callable[[Any, slice], torch.Tensor],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What is split over the data-parallel ranks of an instance, whole and float32, of every
    trained parameter: `piece_of` gives this rank's piece, a range of the flat parameter;
    collective."""
    pieces, found = pieces_of(optimizer), {}
    by_group: dict[Any, list[torch.Tensor]] = {}
    for name, param in named:
        if not param.requires_grad:
            continue
        whole = torch.zeros(param.numel(), device=param.device)
        rows = pieces.get(id(param))
        if rows is not None:
            whole[rows] = piece_of(param, rows).detach().view(-1).float()
        group = (
            parallel_state.get_data_parallel_group(
                with_context_parallel=True, partial_data_parallel=True
            )
            if getattr(param, "allreduce", True)
            else parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
        )
        by_group.setdefault(group, []).append(whole)
        found[name] = whole.view(param.shape)
    for group, tensors in by_group.items():
        add_up(tensors, [group])
    return found
