"""Prints in what the kernels, run by Triton's interpreter, differ from torch on the host: one line
for each case. A program of its own, as the interpreter has to be chosen before Triton is imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from megatron_fsdp_adapter.quantized import e4m3, triton_e4m3
from megatron_fsdp_adapter.quantized.e4m3 import BlockCast, OwnRows, TensorCast
from tests.quantized.te_checks import Shard, quantize
from tests.quantized.te_weights import NASTY, RECIPES, random_case

FLOATS = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
INTEGERS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def convert(values: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    """To nearest even, as a GPU does; the interpreter's own conversion rounds ties otherwise."""
    bits = np.ascontiguousarray(values).view(INTEGERS[source.primitive_bitwidth]).copy()
    found = torch.from_numpy(bits).view(FLOATS[source.name]).to(FLOATS[target.name])
    return found.view(torch.uint8).numpy().view(INTEGERS[target.primitive_bitwidth]).reshape(
        values.shape
    )


def bits(recipe: str, seed: int, nasty: str, kernels: Callable[[Any], Any]) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    case = random_case(recipe, seed, dtype, nasty, "cpu")
    shards = [Shard(case, number, 5 if seed % 2 else 64) for number in range(case.shards)]
    with mock.patch.object(e4m3, "kernels_for", kernels):
        found = quantize(recipe, shards)
    return [*found.values(), *(memory for shard in shards for memory in shard.memory)]


def moved(recipe: str, kernels: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Bytes of weights whose planes come and go, each kind in one storage, written where that was
    last; some weights are another writer's."""
    torch.manual_seed(3)
    mains = [torch.randn(rows, 96).bfloat16() for rows in (64, 16, 48)]
    plane = torch.full((sum(main.numel() for main in mains) + 64,), 7, dtype=torch.uint8)[16:]
    made, first = [], 0
    for main in mains:
        data = plane[first : first + main.numel()]
        made.append(OwnRows(tuple(main.shape), 0, main.view(-1), data))
        first += main.numel()
    cast_class = BlockCast if recipe == "blockwise" else TensorCast
    with mock.patch.object(e4m3, "kernels_for", kernels):
        cast = cast_class(made, torch.bfloat16).only({0, 2}, True)
        vector = torch.zeros(cast.amax_numel)
        cast.begin(vector)
        found = vector.clone()
        plane.untyped_storage().resize_(0)
        keep.append(torch.empty(1 << 20))
        plane.untyped_storage().resize_(plane.numel() + 16)
        plane.fill_(7)
        cast.finish(vector + 1.0)
    return [found, plane]


keep: list[torch.Tensor] = []
"""So that memory is taken anew elsewhere."""


def main() -> None:
    with mock.patch.object(interpreter, "_convert_float", convert), np.errstate(all="ignore"):
        for recipe in RECIPES:
            for seed, nasty in enumerate(NASTY):
                pairs = zip(
                    bits(recipe, seed, nasty, lambda device: None),
                    bits(recipe, seed, nasty, lambda device: triton_e4m3),
                    strict=True,
                )
                differ = sum(
                    int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs
                )
                print(f"{recipe}, {nasty or 'usual'}: {differ} bytes differ", flush=True)
        for recipe in ("tensorwise", "blockwise"):
            pairs = zip(
                moved(recipe, lambda device: None), moved(recipe, lambda device: triton_e4m3),
                strict=True,
            )  # fmt: skip
            differ = sum(
                int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs
            )
            print(f"{recipe}, planes that move: {differ} bytes differ", flush=True)


if __name__ == "__main__":
    main()
