"""Kernels for weights compile for GPUs that are not here, to arithmetic that rounds once."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.quantized import tables

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton's compiler"
)


def ptx_of(kernel: Any, options: dict[str, Any], capability: int, warps: int = 4) -> str:
    """Of a kernel whose other arguments are a table's and a vector of float32."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    known = {
        "lines": "*i64", "work": "*i32", "amaxes": "*fp32", "scales": "*fp32", "base": "i64",
        "scales_base": "i64",
    }  # fmt: skip
    fixed = {
        "MAIN": tl.float32, "ROUNDED": tl.bfloat16, "ALIGNED": True,
        "LARGEST": torch.finfo(torch.float32).max,
        **{name: getattr(tables, name) for name in dir(tables) if name.isupper()}, **options,
    }  # fmt: skip
    signature = {name: known.get(name, "constexpr") for name in kernel.arg_names}
    places = {
        (kernel.arg_names.index(name),): fixed[name]
        for name, kind in signature.items() if kind == "constexpr"
    }  # fmt: skip
    made = compile(
        ASTSource(kernel, signature, places), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps},
    )  # fmt: skip
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_without_the_gpu(capability: int) -> None:
    from megatron_fsdp_adapter.quantized import triton_e4m3

    ptx = ptx_of(triton_e4m3._groups, {"INVERSE": 1.0 / tables.MAX}, capability)
    assert ".ftz" not in ptx and "fma." not in ptx
    assert "ld.global.v4.b32" in ptx, "main weights are not loaded in vectors"
