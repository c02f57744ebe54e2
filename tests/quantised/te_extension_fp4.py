"""What `te_extension` stands in for with NVFP4, operation by operation as the kernels do it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

TILE = 16
LARGEST, TINY = np.finfo(np.float32).max, np.finfo(np.float32).tiny
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
f32 = np.float32


def encode_scale(amax: float) -> np.float32:
    """Of a whole weight."""
    if not amax > 0:
        return f32(1)
    return min(f32(2688) / max(f32(amax), TINY), LARGEST)


def decode_scale(tile: float, amax: float) -> np.float32:
    """Of a tile, before it is rounded to E4M3."""
    found = f32(tile) * (encode_scale(amax) * (f32(1) / f32(6)))
    return LARGEST if np.isnan(found) else min(found, LARGEST)


def e4m3(value: float) -> torch.Tensor:
    """One byte, saturating."""
    return torch.tensor([value]).clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def codes_of(values: torch.Tensor) -> torch.Tensor:
    """E2M1, to nearest even, saturating; NaN is +6."""
    size = values.abs().double()
    far = (size[:, None] - NUMBERS.double()).abs()
    best = (far == far.amin(1, keepdim=True)).long()
    nearest = (best * (2 - torch.arange(8) % 2)).argmax(1)
    nearest = torch.where(size < 6, nearest, 7)
    return (nearest + 8 * (values.signbit() & ~values.isnan())).to(torch.uint8)


def unpacked(data: torch.Tensor) -> torch.Tensor:
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


def dequantized(param: Any) -> torch.Tensor:
    return decoded(param._rowwise_data, param._rowwise_scale_inv, param._amax_rowwise)


def decoded(data: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    codes = unpacked(data)
    values = NUMBERS[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    scales = scales[: codes.shape[0], : codes.shape[1] // TILE]
    scales = scales.contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(TILE, 1)
    return values * (scales * (amax / 2688))


class Fp4Functions:
    """Members of the stand-in."""

    @staticmethod
    def nvfp4_multi_tensor_compute_partial_amax(
        sources: Sequence[torch.Tensor], tiles: Sequence[torch.Tensor],
        wholes: Sequence[torch.Tensor], hs: Sequence[int], ws: Sequence[int],
        starts: Sequence[int], block: int,
    ) -> None:  # fmt: skip
        for source, amax, whole, h, w, start in zip(
            sources, tiles, wholes, hs, ws, starts, strict=True
        ):
            values = torch.zeros(h * w)
            known = source.float().nan_to_num(0.0, math.inf, -math.inf).abs()
            values[start : start + source.numel()] = known
            for row, line in enumerate(values.view(h, w).split(block)):
                for column, part in enumerate(line.split(block, 1)):
                    amax[row, column] = part.max()
            whole.fill_(known.max())

    @staticmethod
    def nvfp4_compute_global_scale(amaxes: torch.Tensor, scales: torch.Tensor) -> None:
        for index, amax in enumerate(amaxes.tolist()):
            scales[index] = float(encode_scale(amax))

    @staticmethod
    def nvfp4_multi_tensor_fused_scale(
        tiles: Any, wholes: Any, scales: Any, targets: Any, amaxes: Any, rows: Any, columns: Any,
        padded: Any, block: int,
    ) -> None:  # fmt: skip
        for tile, whole, scale, target, amax, down, across, height in zip(
            tiles, wholes, scales, targets, amaxes, rows, columns, padded, strict=True
        ):
            amax.copy_(whole)
            # The rows of the target are taken to be as long as those of tiles.
            written = target.view(-1)[: height * across].view(height, across)
            written.zero_()
            for row in range(down):
                for column in range(across):
                    found = float(decode_scale(tile[row, column].item(), whole.item()))
                    scale[row, column] = found
                    written[row * block : (row + 1) * block, column] = e4m3(found)

    @staticmethod
    def nvfp4_multi_tensor_2d_partial_cast(
        sources: Any, outs: Any, scales: Any, wholes: Any, hs: Any, ws: Any, starts: Any, block: int
    ) -> None:
        for source, out, scale, whole, width, start in zip(
            sources, outs, scales, wholes, ws, starts, strict=True
        ):
            encode = f32(whole.item())
            decode = f32(1) / (encode if encode > 0 else f32(1))
            factors = torch.zeros(scale.shape)
            for place, value in enumerate(scale.flatten().tolist()):
                known = f32(e4m3(value).view(torch.float8_e4m3fn).item())
                with np.errstate(over="ignore"):
                    factor = min(f32(1) / (known * decode), LARGEST) if known > 0 else LARGEST
                factors.view(-1)[place] = float(factor)
            place = torch.arange(start, start + source.numel())
            found = source.float() * factors[place // width // block, place % width // block]
            out.view(-1).copy_(packed(codes_of(found)))

    @staticmethod
    def nvfp4_data_transpose(data: torch.Tensor, *, out: Any = None) -> torch.Tensor:
        found = packed(unpacked(data).t().contiguous())
        return found if out is None else out.copy_(found)

    @staticmethod
    def nvfp4_2d_scale_transpose(
        source: torch.Tensor, target: torch.Tensor, down: int, across: int
    ) -> None:
        for row in range(target.shape[0]):
            for column in range(down):
                inside = row // TILE < across
                target[row, column] = source[column * TILE, row // TILE] if inside else 0
