"""Matrices of an export that are cast to bytes with one scale for each 128 x 128 elements."""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_adapter.quantized.blocks import in_blocks


@pytest.mark.parametrize("shape", [(128, 128), (300, 260), (1, 7), (257, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_in_blocks_is_what_each_block_of_it_is_cast_to(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    matrix = (torch.randn(shape) * torch.rand(shape).mul(9).exp()).to(dtype)
    matrix[0, 0] = 0.0
    stored, inverses = in_blocks(matrix)
    assert stored.shape == shape and stored.dtype == torch.float8_e4m3fn
    assert inverses.shape == tuple(-(-n // 128) for n in shape)
    meta = in_blocks(matrix.to("meta"))
    assert [(m.shape, m.dtype) for m in meta] == [(t.shape, t.dtype) for t in (stored, inverses)]
    for row in range(inverses.shape[0]):
        for column in range(inverses.shape[1]):
            place = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            block = matrix[place].float()
            scale = torch.tensor(448.0) / block.abs().max()
            bytes_of = (block * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(stored[place].float(), bytes_of.float()), (row, column)
            assert inverses[row, column] == 1.0 / scale
    blocks_of_zeros, ones = in_blocks(torch.zeros(130, 2))
    assert not blocks_of_zeros.float().any() and torch.equal(ones, torch.ones(2, 1))
