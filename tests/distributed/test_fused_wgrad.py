"""`gradient_accumulation_fusion`: linear layers write weight gradients into the reduce bucket.

Megatron's own layers, on its matrix product where apex is missing; stock DDP with the same option
and the same model without it are the references. Transformer Engine's layers are in
tests/gpu/test_gpu_wgrad.py, both protocols against a plain model in tests/engine.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.core.engine.wgrad import FusedWgrad, WgradProtocol
from megatron_fsdp_adapter.megatron import fused_wgrad
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.variants import Variant, compare, marked, problems


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


@on_ranks(2)
def test_a_bucket_that_is_not_zeroed_is_seen(rank: int, seed: int) -> None:
    """It is added to."""

    def careless(self: FusedWgrad, empty: bool) -> None:
        self.is_open, self._written = True, set(self._adding)

    with mock.patch.object(FusedWgrad, "open", careless):
        assert problems(ROWS[0], rank, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_product_is_added_to_a_main_gradient_of_another_dtype(dtype: torch.dtype) -> None:
    x, grad = torch.randn(6, 5).to(dtype), torch.randn(6, 7).to(dtype)
    main = torch.randn(7, 5).bfloat16()
    expected = main.double() + grad.double().t() @ x.double()
    fused_wgrad.accumulate_wgrad(x, grad, main)
    torch.testing.assert_close(main.double(), expected, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_in_place_of_apex_adds_in_the_dtype_of_the_main_gradient(dtype) -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    x = torch.randn(17, 3, 5, generator=generator).to(dtype)
    grad = torch.randn(17, 3, 7, generator=generator).to(dtype)
    main = torch.randn(7, 5, generator=generator)
    expected = main.double() + torch.einsum("abi,abj->ji", x.double(), grad.double())
    fused_wgrad.accumulate_wgrad(x, grad, main)
    torch.testing.assert_close(main.double(), expected, rtol=1e-5, atol=1e-4)
