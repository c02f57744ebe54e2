"""Gathers whole values of sharded parameters, ours and those that stock DDP's distributed optimizer
splits, for comparison with an unsharded model."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.core.dtensor.uneven import known_chunks
from megatron_fsdp_adapter.state.names import split_depth

Named = Sequence[tuple[str, Any]]
"""(name, pair of unsharded and sharded parameter of the engine)."""


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    return split_depth(name)[1]


def shard_groups(group: Any) -> tuple[Any, ...]:
    """The process groups over which a parameter group is sharded, the finest split first."""
    return tuple(
        axis.group
        for is_split, axis in (
            (group.shards.splits_outer, group.domain.outer),
            (group.config.strategy.shard_main, group.domain.axis),
        )
        if is_split
    )


Part = tuple[str, torch.Tensor, tuple[Any, ...]]
"""Name, a whole tensor in which other ranks have zeros where this one has values, and the groups
that these ranks are in."""


def added_up(parts: Callable[..., Iterator[Part]]) -> Callable[..., dict[str, torch.Tensor]]:
    """The sums of parts over their groups, byte by byte, by name; collective. What is split over
    the same groups is added up at once: its ranks have it in one order."""

    @functools.wraps(parts)
    def sums(*args: Any) -> dict[str, torch.Tensor]:
        found = {}
        by_groups = collections.defaultdict(list)
        for name, whole, groups in parts(*args):
            found[name] = whole
            by_groups[groups].append(whole.view(-1).view(torch.uint8))
        for groups, pieces in by_groups.items():
            together = torch.cat(pieces)
            for group in groups:
                dist.all_reduce(together, group=group)
            for piece, added in zip(pieces, together.split([*map(len, pieces)]), strict=True):
                piece.copy_(added)
        return found

    return sums


@added_up
def full_values(named: Named, local_of: Callable[[Any], torch.Tensor]) -> Iterator[Part]:
    """Name -> whole value, over data-parallel ranks, from `local_of(pair)` of all of them."""
    for name, pair in named:
        local = local_of(pair)
        held = pair.group.shards.held.range(pair.index)
        whole = torch.zeros(
            pair.unsharded.shape, dtype=local.dtype, device=pair.group.domain.mesh.device_type
        )
        whole.view(-1)[held.start : held.stop] = local.reshape(-1).to(whole.device)
        yield name, whole, shard_groups(pair.group)


@added_up
def whole_tensors(values: Mapping[str, DTensor]) -> Iterator[Part]:
    """What `DTensor.full_tensor` gives of each, by name, in a tenth of the time."""
    for name, value in values.items():
        local = value._local_tensor.detach().contiguous()
        mesh = value.device_mesh
        whole = torch.zeros(value.shape, dtype=local.dtype, device=mesh.device_type)
        known_chunks(value).put_into(whole, local.to(whole.device))
        split = [n for n, placed in enumerate(value.placements) if not placed.is_replicate()]
        yield name, whole, tuple(mesh.get_group(n) for n in split)


# What stock DDP's distributed optimizer splits.


def optimizers_of(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def main_piece(param: Any, rows: slice) -> torch.Tensor:
    """A float32 parameter is its own main weight."""
    main = getattr(param, "main_param", None)
    if main is None:
        return param.detach().view(-1)[rows]
    return main


def pieces_of(optimizer: Any) -> Mapping[int, slice]:
    """By the id of a parameter, the range of it, flat, that this rank's optimizer steps."""
    pieces = {}
    for one in optimizers_of(optimizer):
        for param in getattr(one, "model_param_gbuf_map", ()):
            held = one._get_model_param_range_map(param)["param"]
            pieces[id(param)] = slice(held.start, held.end)
    return pieces


@added_up
def put_together(
    named: Iterable[tuple[str, Any]],
    optimizer: Any,
    piece_of: Callable[[Any, slice], torch.Tensor],
) -> Iterator[Part]:
    """What is split over the data-parallel ranks of an instance, whole and float32, of every
    trained parameter: `piece_of` gives this rank's piece, a range of the flat parameter."""
    pieces = pieces_of(optimizer)
    for name, param in named:
        if not param.requires_grad:
            continue
        whole = torch.zeros(param.shape, device=param.device)
        rows = pieces.get(id(param))
        if rows is not None:
            whole.view(-1)[rows] = piece_of(param, rows).detach().view(-1).float()
        if getattr(param, "allreduce", True):
            group = parallel_state.get_data_parallel_group(
                with_context_parallel=True, partial_data_parallel=True
            )
        else:
            group = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
        yield name, whole, (group,)
