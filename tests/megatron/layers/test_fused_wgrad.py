"""The GEMM in place of apex's for `gradient_accumulation_fusion`. Megatron's own layers
with it: cells of the matrix, whose reference is stock DDP with the same option. Transformer
Engine's: tests/gpu/test_gpu_wgrad.py; both protocols against a plain model:
tests/core/engine.
"""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_adapter.megatron.layers import fused_wgrad

CHECKS = ("megatron/layers/fused_wgrad.py",)


@pytest.mark.parametrize(
    ("dtype", "main_dtype", "bound"),
    [
        (torch.float32, torch.float32, 1e-4),
        (torch.bfloat16, torch.float32, 1e-4),
        (torch.float32, torch.bfloat16, 2**-6),
        (torch.float16, torch.bfloat16, 2**-6),
    ],
)
def test_the_product_in_place_of_apex_adds_in_the_dtype_of_the_main_gradient(
    dtype: torch.dtype, main_dtype: torch.dtype, bound: float
) -> None:
    x = torch.randn(17, 3, 5).to(dtype)
    grad = torch.randn(17, 3, 7).to(dtype)
    main = torch.randn(7, 5).to(main_dtype)
    expected = main.double() + torch.einsum("abi,abj->ji", x.double(), grad.double())
    fused_wgrad.accumulate_wgrad(x, grad, main)
    torch.testing.assert_close(main.double(), expected, rtol=bound, atol=bound)
