"""`gradient_accumulation_fusion`: linear layers write weight gradients into the reduce bucket.

Megatron's own layers, on its matrix product where apex is missing; stock DDP with the same option
and the same model without it are the references. Transformer Engine's layers are in
tests/gpu/test_gpu_wgrad.py, both protocols against a plain model in tests/engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.megatron import fused_wgrad
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.variants import Variant, compare, marked


def linear_layers_write(ours: Any, reference: Any, strategy: str) -> None:
    written = [
        pair.managed.fqns[0] for pair in ours.wrapper.engine.pairs
        if pair.managed.writer is WgradProtocol.ACCUMULATES
    ]  # fmt: skip
    assert len(written) == 4 * ours.case.num_layers + 1, written


ROWS = tuple(
    Variant(
        f"{name}, reference {'fused' if fused else 'not fused'}", steps=2,
        case={"fused": True, **case}, reference={"case": {"fused": fused}},
        expect=linear_layers_write,
    )
    for name, case in (
        ("untied", {"microbatches": 3}),
        # A weight that the output layer adds to, and autograd for the embedding.
        ("tied", {"microbatches": 2, "tied": True, "recompute": "full-1"}),
    )
    for fused in (True, False)
)  # fmt: skip


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_fused_and_unfused_stock_ddp_take_the_same_steps(
    row: Variant, rank: int, seed: int
) -> None:
    compare(row, rank, seed)


@pytest.mark.parametrize(
    ("dtype", "main_dtype", "bound"),
    [
        (torch.float32, torch.float32, 1e-4), (torch.bfloat16, torch.float32, 1e-4),
        (torch.float32, torch.bfloat16, 2**-6), (torch.float16, torch.bfloat16, 2**-6),
    ],
)  # fmt: skip
def test_the_product_in_place_of_apex_adds_in_the_dtype_of_the_main_gradient(
    dtype: torch.dtype, main_dtype: torch.dtype, bound: float
) -> None:
    x, grad = torch.randn(17, 3, 5).to(dtype), torch.randn(17, 3, 7).to(dtype)
    main = torch.randn(7, 5).to(main_dtype)
    expected = main.double() + torch.einsum("abi,abj->ji", x.double(), grad.double())
    fused_wgrad.accumulate_wgrad(x, grad, main)
    torch.testing.assert_close(main.double(), expected, rtol=bound, atol=bound)
