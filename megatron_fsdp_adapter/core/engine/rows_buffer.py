"""A buffer over tensors that were there before it: the rows of sharded parameters, of which a
program may have views, in a state dict of before the first forward, for example."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fsdp_adapter.core.layout.group import ShardSpec

from .buffer import WHOLE, GroupShards, ShardedBuffer, mark_owned


class RowsBuffer(ShardedBuffer):
    """The rows of each parameter of a group that this rank holds, each in a tensor of its own.

    Its parts are rows without the padding that segments have. It has memory for good.

    Args:
        stored: the shard that the rows are of.
        specs: shards that are equal to it, itself included.
        rows: of each parameter, in layout order.
    """

    has_padding = False
    """Each parameter has a tensor of its own."""

    def __init__(
        self, stored: ShardSpec, specs: Sequence[ShardSpec], rows: Sequence[torch.Tensor]
    ) -> None:
        self.in_slot = False  # whether it lies in given memory
        self.fixed = True  # its storage stays
        self.host = None  # there are no copies in host memory
        self.stored = stored  # the shard that there is memory for
        self.plane = WHOLE  # one element for each of the parameters
        self.rows = list(rows)  # of each parameter
        for row in self.rows:
            mark_owned(row)
        # By shard, each parameter's rows, 1-D.
        self._segments = {spec: [row.view(-1) for row in self.rows] for spec in specs}
        # By shard, each parameter's rows.
        self._items = dict.fromkeys(specs, self.rows)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows[0].dtype

    @property
    def storages(self) -> list[torch.Tensor]:
        return self.rows

    @property
    def nbytes(self) -> int:
        return sum(row.numel() * row.element_size() for row in self.rows)

    @property
    def allocated(self) -> bool:
        return True

    def allocate(self) -> None:
        """Does nothing."""

    def release(self) -> None:
        """Does nothing."""

    def forget(self) -> None:
        """Does nothing."""


def buffer_of_rows(shards: GroupShards, rows: Sequence[torch.Tensor]) -> RowsBuffer:
    """A buffer of these rows of the `held` shard."""
    count = shards.held.layout.num_shards
    every = (shards.full, shards.inner, shards.held)
    equal = [spec for spec in every if spec.layout.num_shards == count]
    return RowsBuffer(shards.held, equal, rows)
