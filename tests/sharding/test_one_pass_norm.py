"""The sum of squares in one launch: what the kernel is told, and how exact the sum is. The kernel
itself: tests/gpu/test_gpu_one_pass_norm.py."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.sharding import one_pass_norm
from megatron_fsdp_adapter.sharding.one_pass_norm import CHUNK, OnePassSquares
from tests.sharding.host_squares import HostSquares

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
FLOAT32, BF16 = torch.float32, torch.bfloat16


def _squares() -> OnePassSquares:
    kernel = HostSquares()
    return OnePassSquares(lambda device: kernel)


@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
def test_sums_are_those_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for sizes in ((5,), (CHUNK,), (CHUNK - 1, 0, 3 * CHUNK + 7, 1), (3, 40 * CHUNK, 0), (0,)):
        tensors = [(torch.randn(size).exp() * 1e-3).to(dtype) for size in sizes]
        found = _squares()(tensors)
        assert found is not None and found.shape == (1,) and found.dtype == FLOAT32
        expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
        assert abs(found.item() - expected) <= 2e-7 * expected, sizes


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_stays_so(wrong: float) -> None:
    for place in (0, CHUNK, 2 * CHUNK):
        tensors = [torch.zeros(3), torch.zeros(2 * CHUNK + 1)]
        tensors[1][place] = wrong
        found = _squares()(tensors)
        assert found is not None
        assert repr(found.item()) == repr(wrong * wrong)


def test_what_the_kernel_does_not_take_is_left_to_others() -> None:
    wide, kernel = torch.ones(8), HostSquares()
    squares = OnePassSquares(lambda device: kernel)
    meta = torch.ones(8, device="meta")
    for tensors in (
        [], [wide.half()], [wide.double()], [wide, wide.bfloat16()], [wide[::2]], [wide, meta],
    ):  # fmt: skip
        assert squares(tensors) is None
    assert not kernel.tables
    assert OnePassSquares(one_pass_norm.kernel_of)([wide]) is None, "there is none for the host"


def test_the_kernel_is_tried_before_it_is_used_and_without_it_a_warning_says_what_is_done() -> None:
    """Triton is not where the tests run: a module stands for the kernel's."""
    name, kernel = "megatron_fsdp_adapter.sharding.triton_norm", HostSquares()
    stand_in = SimpleNamespace(sums_of_squares=kernel)
    tried = one_pass_norm.kernel_of.tried
    with mock.patch.dict(sys.modules, {name: stand_in}):  # type: ignore[dict-item]
        assert tried(CPU) is kernel
    assert [table.aligned for table in kernel.tables] == [False, True]
    broken = SimpleNamespace(sums_of_squares=lambda table, tensors: 1.01 * kernel(table, tensors))
    with (
        mock.patch.dict(sys.modules, {name: broken}),  # type: ignore[dict-item]
        pytest.warns(UserWarning, match="a sum of squares is"),
    ):
        assert tried(CPU) is None
    with (
        mock.patch.dict(sys.modules, {name: None}),  # type: ignore[dict-item]
        pytest.warns(UserWarning, match="the gradient norm is left to megatron-core"),
    ):
        assert tried(CPU) is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_interpreted_adds_up_squares() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.sharding.interpreted_norm"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    lines = found.stdout.splitlines()
    assert len(lines) == 26 and all(line.endswith(": True") for line in lines), found.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)
def test_the_kernel_compiles_without_the_gpu() -> None:
    """With loads of 16 bytes where addresses allow them, and without local memory."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megatron_fsdp_adapter.sharding import triton_norm as kernels

    kernel = kernels._sums_of_squares
    for capability, value, aligned in itertools.product(
        (90, 100), (tl.float32, tl.bfloat16), (True, False)
    ):
        fixed = {
            "VALUE": value, "ALIGNED": aligned, "CHUNK": CHUNK, "BLOCK": kernels.BLOCK,
            "STAGES": kernels.STAGES,
        }  # fmt: skip
        signature = {
            "addresses": "*i64", "tensor_of": "*i32", "first_of": "*i32", "count": "i32",
            "sums": "*fp32", **dict.fromkeys(fixed, "constexpr"),
        }  # fmt: skip
        places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
        made = compile(
            ASTSource(kernel, signature, places), target=GPUTarget("cuda", capability, 32),
            options={"num_warps": kernels.WARPS},
        )  # fmt: skip
        assert ("ld.global.v4.b32" in made.asm["ptx"]) is aligned, (value, aligned)
        assert ".local" not in made.asm["ptx"]
