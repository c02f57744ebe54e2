"""Prints whether the kernels, run by Triton's interpreter, give what torch gives on the host: one
line a case. A program of its own, as the interpreter has to be chosen before Triton is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from megatron_fsdp_adapter.core.kernels import triton_sums
from megatron_fsdp_adapter.optim.muon import triton_symmetric
from megatron_fsdp_adapter.quantized import e4m3, triton_e4m3
from megatron_fsdp_adapter.quantized.e4m3 import BlockCast, LocalRows, TensorCast
from tests.lib.quantized.te_checks import Shards, found_in
from tests.lib.quantized.te_weights import NASTY, RECIPES, random_case

FLOATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8e4nv": torch.float8_e4m3fn,
}
INTEGERS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def convert(values: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    """To nearest even, as a GPU does; the interpreter's own conversion rounds ties otherwise."""
    given = np.ascontiguousarray(values).view(INTEGERS[source.primitive_bitwidth]).copy()
    found = torch.from_numpy(given).view(FLOATS[source.name]).to(FLOATS[target.name])
    stored = found.view(torch.uint8).numpy().view(INTEGERS[target.primitive_bitwidth])
    return stored.reshape(values.shape)


def bits(recipe: str, seed: int, nasty: str, kernels: Callable[[Any], Any]) -> list[torch.Tensor]:
    odd = seed % 2
    case = random_case(recipe, seed, torch.bfloat16 if odd else torch.float32, nasty, "cpu")
    shards = Shards(case, [recipe], 5 if odd else 64)
    with mock.patch.object(e4m3, "kernels_for", kernels):
        shards.quantize()
    found = [*shards.memory]
    for own in shards.weights:
        for one in own:
            for noted in found_in(one.param).values():
                found.append(torch.stack([noted]))
    return found


def moved(recipe: str, kernels: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Bytes of weights whose planes come and go, each kind in one storage, written where that was
    last; some weights are another writer's."""
    torch.manual_seed(3)
    mains = [torch.randn(rows, 96).bfloat16() for rows in (64, 16, 48)]
    sizes = [main.numel() for main in mains]
    plane = torch.full((sum(sizes) + 64,), 7, dtype=torch.uint8)[16:]
    made = [
        LocalRows(tuple(main.shape), 0, main.view(-1), (data,))
        for main, data in zip(mains, plane[: sum(sizes)].split(sizes), strict=True)
    ]
    cast_class = BlockCast if recipe == "block128" else TensorCast
    with mock.patch.object(e4m3, "kernels_for", kernels):
        cast = cast_class(made, torch.bfloat16).only({0, 2}, True)
        vector = torch.zeros(cast.amax_numel)
        cast.begin(vector)
        found = vector.clone()
        plane.untyped_storage().resize_(0)
        elsewhere = torch.empty(1 << 20)  # so that memory is taken again
        plane.untyped_storage().resize_(plane.numel() + 16)
        plane.fill_(7)
        cast.finish(vector + 1.0)
    del elsewhere
    return [found, plane]


Line = tuple[str, bool]


def of_torch(device: Any) -> None:
    return None


def of_triton(device: Any) -> Any:
    return triton_e4m3


def casts() -> Iterator[Line]:
    """Bytes, scales and amaxes of weights are those of torch."""
    cases: dict[str, Callable[..., list[torch.Tensor]]] = {}
    for recipe in RECIPES:
        for seed, nasty in enumerate(NASTY):
            name = f"{recipe}, {nasty or 'usual'}"
            cases[name] = functools.partial(bits, recipe, seed, nasty)
    for recipe in ("tensorwise", "block128"):
        cases[f"{recipe}, planes that move"] = functools.partial(moved, recipe)
    for name, case in cases.items():
        same = []
        for expected, found in zip(case(of_torch), case(of_triton), strict=True):
            same.append(torch.equal(expected.view(torch.uint8), found.view(torch.uint8)))
        yield name, all(same)


def sums() -> Iterator[Line]:
    """Of bf16 rows and of their casts to float32: bits of additions in the order of the rows."""
    for count, numel in ((1, 5), (2, 2048), (3, 2049), (4, 4100)):
        rows = torch.randn(count, numel).bfloat16()
        before = torch.randn(numel)
        total = functools.reduce(torch.add, rows.float()) * 0.5  # a scale whose product is exact
        for accumulate, sent in itertools.product((False, True), (rows, rows.float())):
            output = before.clone()
            triton_sums.sum_rows(sent, output, 0.5, accumulate)
            expected = total + before if accumulate else total
            yield f"{count} rows of {numel}, {accumulate}", torch.equal(output, expected)


SIDE = 16
SHAPES = (
    (1, 16, 32, False),
    (2, 80, 40, False),
    (3, 72, 88, False),
    (2, 48, 96, True),
    (2, 96, 32, False),
    (1, 16, 16, True),
)
"""Of a batch, rows and columns of its matrices, and whether they are given transposed."""


def symmetric() -> Iterator[Line]:
    """Products are exactly symmetric, and as near to exact ones as float16 is."""
    for depth, (batch, n, k, tall) in itertools.product((16, 32), SHAPES):
        if tall and k % depth:
            continue
        torch.manual_seed(n)
        shape = (k, n) if tall else (n, k)
        x = torch.randn(batch, *shape).half()
        wide = x.mT if tall else x
        gram = wide.double() @ wide.double().mT
        added = gram.half()
        combined = 0.5 * added.double() - 0.25 * gram + 3.0 * torch.eye(n).double()
        for given, numbers, expected in (
            (None, (0.0, 1.0, 0.0), gram),
            (added, (0.5, -0.25, 3.0), combined),
        ):
            found = triton_symmetric.symmetric_product(x, x, given, *numbers, tall, SIDE, depth)
            error = float((found - expected).abs().max() / expected.abs().max())
            same = error < 2**-10 and torch.equal(found, found.mT)
            yield f"symmetric {(batch, n, k, tall)} by {depth}, {numbers}", same
    for n in (1, SIDE, 5 * SIDE + 1, 40 * SIDE, 40 * SIDE + 1):
        rows = -(-n // SIDE)
        covered = rows * (rows + 1) // 2
        yield f"tiles of {n}", triton_symmetric.tiles_of(n, SIDE) == covered


def main() -> None:
    with mock.patch.object(interpreter, "_convert_float", convert), np.errstate(all="ignore"):
        for name, same in itertools.chain(casts(), sums(), symmetric()):
            print(f"{name}: {same}", flush=True)


if __name__ == "__main__":
    main()
