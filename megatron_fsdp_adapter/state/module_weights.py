"""A parameter of a sharded model, as its module would have it without sharding.

For code that reads and writes weights one at a time and knows nothing of shards. A weight is
gathered when it is read, and cut into rows when it is written. No other whole weight is in memory
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.engine.params import ParamPair
from megatron_fsdp_adapter.core.layout.group import ShardSpec
from megatron_fsdp_adapter.core.layout.ranges import FlatRange, nested_shard_rank
from megatron_fsdp_adapter.core.topology import Axis


@dataclass(frozen=True, eq=False)
class ModuleWeight:
    """The weight of `pair`, one of the pairs of `engine`.

    shape: of the module's own parameter, which is one tensor-parallel slice; dtype: the dtype of
    values in which the module computes, also for a quantized weight; device: where modules compute.
    Main weights may be in host memory."""

    pair: ParamPair
    engine: FsdpEngine

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.pair.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.pair.unsharded.dtype

    @property
    def device(self) -> torch.device:
        return self.pair.unsharded.device

    @property
    def data(self) -> ModuleWeight:
        """Itself. Code that writes a tensor's `data`, to bypass autograd, writes this weight."""
        return self

    @torch.no_grad()
    def copy_(self, value: torch.Tensor) -> ModuleWeight:
        """Writes this rank's rows of `value` to the main weights. Returns itself.

        value: a whole plain tensor of any dtype, on any device. Call the engine's
        `main_weights_changed()` after the last write. Raises ValueError for another shape."""
        if value.shape != self.shape:
            name = self.pair.managed.fqns[0]
            raise ValueError(
                f"parameter {name} has shape {tuple(self.shape)}, not {tuple(value.shape)}"
            )
        local = self.local
        rows = self.rows
        local.copy_(value.reshape(-1)[rows.start : rows.stop].view(local.shape))
        return self

    def gather(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole main weights in `dtype` (None: `self.dtype`). Collective as `gather_rows`."""
        return gather_rows(self.pair, self.local, dtype or self.dtype)

    @property
    def rows(self) -> FlatRange:
        """The elements of the flattened parameter that this rank has."""
        held = self.pair.group.shards.held
        return rows_of(self.pair, held, held.rank)

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows of the main weights, after everything that still writes them."""
        self.engine.gather.updates.settle()
        group = self.pair.group
        return group.main.buffer.items(group.shards.held)[self.pair.index]


def rows_of(pair: ParamPair, spec: ShardSpec, number: int) -> FlatRange:
    """The elements of the flattened parameter that shard `number` of `spec`'s layout has."""
    return spec.layout.shard_range(pair.index, number)


@torch.no_grad()
def gather_rows(pair: ParamPair, local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor of the geometry of `pair` (main weights or gradient), on every rank that has
    a shard: new memory in `dtype`, in the shape of the module's own parameter, on the device where
    modules compute.

    local: this rank's rows of the tensor. Collective over the ranks that have shards. Each sends
    its rows once, out of the result itself, so no rank holds more than the result."""
    group = pair.group
    held = group.shards.held
    inner = group.shards.inner
    shape = torch.Size(pair.spec.shape)
    whole = torch.empty(shape.numel(), dtype=dtype, device=pair.unsharded.device)
    own = rows_of(pair, held, held.rank)
    whole[own.start : own.stop].copy_(local.view(-1))
    outer = group.domain.outer
    if group.shards.splits_outer and outer is not None:
        numbers = [nested_shard_rank(inner.rank, rank, outer.size) for rank in range(outer.size)]
        _exchange(whole, outer, [rows_of(pair, held, number) for number in numbers])
    if group.shards.splits_axis:
        axis = group.domain.axis
        _exchange(whole, axis, [rows_of(pair, inner, number) for number in range(axis.size)])
    return whole.view(shape)


def _exchange(whole: torch.Tensor, axis: Axis, parts: Iterable[FlatRange]) -> None:
    """Fills the parts of `whole` that the other ranks of `axis` have. parts: of each rank in order.

    One broadcast for each part: an all-gather needs parts of equal size, and a sum with zeros
    elsewhere (all-reduce) would send everything twice."""
    works = []
    for rank, part in zip(axis.ranks, parts, strict=True):
        if not part.empty:
            rows = whole[part.start : part.stop]
            works.append(dist.broadcast(rows, rank, group=axis.group, async_op=True))
    for work in works:
        work.wait()


def module_weights(engines: Iterable[FsdpEngine]) -> dict[int, ModuleWeight]:
    """The weights of `engines`. Each is there twice: by the id of its unsharded and of its sharded
    parameter."""
    found = {}
    for engine in engines:
        for pair in engine.pairs:
            weight = ModuleWeight(pair, engine)
            found[id(pair.unsharded)] = weight
            found[id(pair.sharded)] = weight
    return found


def shared_embeddings(engines: Iterable[FsdpEngine]) -> list[ModuleWeight]:
    """The embedding weights that Megatron shares across pipeline stages."""
    found = []
    for engine in engines:
        for pair in engine.pairs:
            if getattr(pair.sharded, "shared_embedding", False):
                found.append(ModuleWeight(pair, engine))
    return found


def copy_from_first_stage(shared: Sequence[ModuleWeight], group: Any) -> None:
    """Gives the `shared` embeddings of this rank the values of the first pipeline stage's one.

    group: core's embedding group, whose first rank is on the first stage. Collective over `group`;
    the ranks of the first stage also gather over their data-parallel ranks. Call the
    `main_weights_changed()` of the engines afterwards."""
    first, *others = shared
    source = dist.get_process_group_ranks(group)[0]
    if dist.get_rank() == source:
        value = first.gather(torch.float32)
    else:
        others = [first, *others]
        value = torch.empty(first.shape, dtype=torch.float32, device=first.device)
    dist.broadcast(value, source, group=group)
    for weight in others:
        weight.copy_(value)
