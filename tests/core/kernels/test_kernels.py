"""The Triton kernels without a GPU: interpreted, beside torch on the host, and compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp_adapter.quantized import tables

CHECKS = (
    "core/kernels/__init__.py",
    "core/kernels/triton_sums.py",
    "optim/muon/triton_symmetric.py",
    "quantized/e4m3.py",
    "quantized/triton_e4m3.py",
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
CASES = 18 + 16 + 2 * 11 + 5
"""Of casts, of sums, of symmetric products and of their tiles."""


def test_interpreted_they_compute_what_torch_computes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lib.quantized.interpreted"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == CASES, done.stderr or done.stdout
    assert not [line for line in lines if not line.endswith(": True")]


def compiled(
    kernel: Any,
    known: dict[str, str],
    fixed: dict[str, Any],
    capability: int,
    aligned: int = 0,
    **options: int,
) -> Any:
    """known: types of arguments; fixed: values of the others; aligned: how many are multiples of
    16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    signature = {name: known.get(name, "constexpr") for name in names}
    places = {(at,): fixed[name] for at, name in enumerate(names) if name not in known}
    multiples = {(at,): [["tt.divisibility", 16]] for at in range(aligned)}
    return compile(
        ASTSource(kernel, signature, places, multiples),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )


needs_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton's compiler"
)


@needs_compiler
@pytest.mark.parametrize("capability", [90, 100])
def test_casts_compile_to_arithmetic_that_rounds_once(capability: int) -> None:
    import triton.language as tl

    from megatron_fsdp_adapter.quantized import triton_e4m3

    fixed = {
        "MAIN": tl.float32,
        "ROUNDED": tl.bfloat16,
        "ALIGNED": True,
        "INVERSE": 1.0 / tables.MAX,
        **{name: getattr(tables, name) for name in dir(tables) if name.isupper()},
    }
    known = {"lines": "*i64", "work": "*i32"}
    made = compiled(triton_e4m3._groups, known, fixed, capability, num_warps=4)
    ptx = made.asm["ptx"]
    assert made.asm["cubin"]
    assert ".ftz" not in ptx
    assert "fma." not in ptx
    assert "ld.global.v4.b32" in ptx, "main weights are not loaded in vectors"


@needs_compiler
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("tall", [False, True])
def test_symmetric_products_compile_to_tensor_cores(tall: bool, capability: int) -> None:
    from megatron_fsdp_adapter.optim.muon import triton_symmetric as kernels

    fixed = {
        "ADDED": True, "TALL": tall, "EVEN": True, "SIDE": kernels.SIDE, "DEPTH": kernels.DEPTH,
    }  # fmt: skip
    known = dict.fromkeys((n for n in kernels._product.arg_names if n not in fixed), "fp32")
    known |= dict.fromkeys(("x", "y", "added", "out"), "*fp16") | {"n": "i32", "k": "i32"}
    made = compiled(
        kernels._product,
        known,
        fixed,
        capability,
        6,
        num_warps=kernels.WARPS,
        num_stages=kernels.STAGES,
    )
    ptx = made.asm["ptx"]
    assert "wgmma" in ptx or "tcgen05.mma" in ptx
    assert "cp.async" in ptx, "tiles are not moved in vectors"
    assert "st.global.v4.b32" in ptx, "tiles are not moved in vectors"
    assert 2 * made.metadata.shared <= 227 * 1024, "two tiles do not fit beside each other"
