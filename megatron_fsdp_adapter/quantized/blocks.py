"""A whole matrix as E4M3 bytes with one scale for each 128 x 128 elements."""

from __future__ import annotations

import torch

from .e4m3 import BlockCast, OwnRows, write_scales
from .tables import BLOCK


@torch.no_grad()
def in_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes (float8_e4m3fn) of a (M, K) matrix in float32, bf16 or fp16, and float32 (M / 128,
    K / 128), rounded up, by which they are multiplied to get it back. A scale is 448 / amax."""
    rows, columns = matrix.shape
    shape = (-(-rows // BLOCK), -(-columns // BLOCK))
    stored = torch.empty(rows * columns, dtype=torch.uint8, device=matrix.device)
    if matrix.is_meta:
        inverses = torch.empty(shape, device="meta")
    else:
        own = OwnRows((rows, columns), 0, matrix.contiguous().view(-1), stored)
        cast = BlockCast([own], matrix.dtype, powers_of_two=False)
        amaxes, scales, found = torch.zeros(3, cast.amax_numel, device=matrix.device).unbind()
        cast.begin(amaxes)
        write_scales(amaxes, scales, found)
        cast.finish(scales)
        inverses = cast.views(found)[0][:, : shape[1]].contiguous()
    return stored.view(rows, columns).view(torch.float8_e4m3fn), inverses
