"""The kernel of `one_pass_norm` in torch, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fsdp_adapter.sharding.tensor_table import Table

LANES = 4096


class HostSquares:
    """Adds up as the kernel does, by the table, and keeps the tables that it was given."""

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def __call__(self, table: Table, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        assert table.addresses[0].tolist() == [tensor.data_ptr() for tensor in tensors]
        assert table.addresses[1].tolist() == [tensor.numel() for tensor in tensors]
        self.tables.append(table)
        sums = torch.empty(table.chunks)
        for program, number in enumerate(table.tensor_of.tolist()):
            start = (program - int(table.first_of[number])) * table.chunk
            chunk = tensors[number].view(-1)[start : start + table.chunk].float()
            lanes = torch.zeros(LANES)
            for part in chunk.split(LANES):
                lanes[: part.numel()] += part * part
            sums[program] = lanes.sum()
        return sums
