"""Gradients in 8-bit blocks: what a block stands for, how far off a sum may be, the kernels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_adapter.core.config import STRATEGIES, EngineConfig, MixedPrecisionPolicy
from megatron_fsdp_adapter.core.runtime.block_format import (
    BLOCK,
    LARGEST_FINITE,
    NOT_FINITE,
    row_bytes,
)
from megatron_fsdp_adapter.core.runtime.blocks import encode, sum_encoded
from megatron_fsdp_adapter.core.runtime.comm import Communicator
from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]


def decoded(source: torch.Tensor) -> torch.Tensor:
    """Of (n) elements, what arrives of them."""
    rows = torch.full((1, row_bytes(source.numel())), 77, dtype=torch.uint8)
    encode(source[None], rows)
    output = torch.empty(source.numel())
    sum_encoded(rows, output)
    return output


def allowed(source: torch.Tensor) -> torch.Tensor:
    """max(|x| / 16, m / 2**17) of each element x of a block whose largest is m, in float64."""
    exact = source.double()
    blocks = torch.nn.functional.pad(exact, (0, -exact.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: exact.numel()]
    return torch.maximum(exact.abs() / 16, largest * 2.0**-17)


def random_source(numel: int, seed: int, spread: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, spread + 1, (numel,), generator=generator)
    return torch.ldexp(torch.randn(numel, generator=generator), powers).to(dtype)


@settings(deadline=None)
@given(
    st.integers(1, 200), st.integers(0, 1 << 20), st.sampled_from([0, 3, 30, 60]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_every_element_is_within_the_bound(numel, seed, spread, dtype):
    source = random_source(numel, seed, spread, dtype)
    error = (decoded(source).double() - source.double()).abs()
    assert bool((error <= allowed(source)).all())


def test_the_bound_is_reached_and_what_e4m3_has_is_exact():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = every[every.isfinite()]
    for power in (-100, 0, 90):
        source = torch.ldexp(exact, torch.tensor(power))
        own = torch.nn.functional.pad(source.view(-1, 2), (0, BLOCK - 2))
        assert torch.equal(decoded(source[-64:]), source[-64:])  # 448 is in the second block
        assert own.shape[1] == BLOCK
    source = torch.zeros(BLOCK)
    source[0], source[1], source[2] = 448.0, 17.0, 2.0**-10 * 1.01
    found = decoded(source)
    assert abs(found[1] - 17.0) == 1.0 and found[2] == 2.0**-9
    assert torch.equal(decoded(torch.zeros(70)), torch.zeros(70))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_block_with_what_is_not_finite_arrives_as_nan(bad):
    source = torch.ones(3 * BLOCK)
    source[BLOCK + 5] = bad
    found = decoded(source)
    assert found[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(found[:BLOCK], torch.ones(BLOCK)) and found[2 * BLOCK :].isfinite().all()


def test_the_largest_and_smallest_numbers_arrive():
    largest, smallest = 3.2e38, torch.finfo(torch.float32).tiny
    for value in (largest, -largest, smallest, 2.0**-149):
        source = torch.tensor([value, 0.0])
        error = (decoded(source).double() - source.double()).abs()
        assert bool((error <= source.double().abs() / 16 + 2.0**-136).all())


NUMEL = 1000


def _sums(rank: int, world: int) -> dict[str, Any]:
    communicator = Communicator(dist.group.WORLD, torch.device("cpu"))
    grads = random_source(NUMEL * world, rank, 3, torch.float32)
    everyone = [torch.empty_like(grads) for _ in range(world)]
    dist.all_gather(everyone, grads)
    mine = [other.view(world, -1)[rank] for other in everyone]
    before = random_source(NUMEL, 99, 0, torch.float32)
    found = {}
    for accumulate in (False, True):
        output, scale = before.clone(), 1 / world
        pairs = [(output, grads)]
        for work in communicator.reduce_scatter_in_blocks(pairs, None, scale, accumulate):
            work.wait()
        total = torch.zeros(NUMEL)
        for piece in mine:
            total += decoded(piece)
        total *= scale
        found[f"in order, {accumulate}"] = torch.equal(
            output, total + before if accumulate else total
        )
        exact = sum(piece.double() for piece in mine) * scale
        bound = sum(allowed(piece) for piece in mine) * scale + 1e-6 * (exact.abs() + 1)
        error = (output.double() - exact - (before.double() if accumulate else 0.0)).abs()
        found[f"within, {accumulate}"] = bool((error <= bound).all())
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_reduction_is_the_float32_sum_of_blocks_in_the_order_of_ranks(world):
    for found in run_ranks(_sums, world):
        assert all(found.values()), found


def test_what_has_no_blocks_is_refused():
    for strategy, policy in (
        ("no_shard", MixedPrecisionPolicy()),
        ("optim_grads", MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)),
    ):
        with pytest.raises(ValueError, match="wire_in_blocks=True"):
            EngineConfig(STRATEGIES[strategy], policy, wire_in_blocks=True)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_interpreted_kernels_give_the_same_bits() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.interpreted_blocks"], cwd=ROOT, capture_output=True,
        text=True, timeout=300, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 5 and all(line.endswith(": 0 differ") for line in lines), lines


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_without_the_gpu(capability: int) -> None:
    """Rows that are multiples of 16 bytes, as aligned shards make them, are read in vectors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megatron_fsdp_adapter.core.runtime import triton_blocks as kernels

    known = {"source": "*fp32", "rows": "*u8", "output": "*fp32", "numel": "i32", "width": "i32",
             "scale": "fp32"}  # fmt: skip
    fixed = {
        "TILE": kernels.TILE, "BLOCK": BLOCK, "LARGEST": LARGEST_FINITE, "COUNT": 4,
        "NOT_FINITE": NOT_FINITE, "ACCUMULATE": True,
    }  # fmt: skip
    for kernel in (kernels._encode, kernels._sum_encoded):
        names = kernel.arg_names
        signature = {name: known.get(name, "constexpr") for name in names}
        constants = {(names.index(n),): fixed[n] for n in names if n not in known}
        aligned = {
            (names.index(n),): [["tt.divisibility", 16]]
            for n in names if n in known and n != "scale"
        }  # fmt: skip
        made = compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", capability, 32), options={"num_warps": kernels.WARPS},
        )
        ptx = str(made.asm["ptx"])
        assert ".ftz" not in ptx and "e4m3" in ptx
        assert "ld.global.v4.b32" in ptx
