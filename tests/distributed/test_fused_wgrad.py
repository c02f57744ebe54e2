"""`gradient_accumulation_fusion`: linear layers write weight gradients into the reduce bucket.

Megatron's own layers, on its matrix product where apex is missing; stock DDP with the same option
and the same model without it are the references. Transformer Engine's layers are in
tests/gpu/test_gpu_te.py, both protocols against a plain model in tests/engine.
"""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.megatron import fused_wgrad
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.distributed.checks import check_step, steps_from_reference
from tests.distributed.gpt import STRATEGIES, Case, build_trainer, init_megatron
from tests.distributed.launch import run_ranks

CASES = (
    Case(fused=True, microbatches=3),
    Case(fused=True, microbatches=2, tied=True, recompute="full-1"),
)


def _compare(rank: int, world: int) -> None:
    device = init_megatron()
    patches.install(FUSED_WGRAD)
    for case in CASES:
        for reference_case in (case, case.but(fused=False)):
            reference = build_trainer(reference_case, None, device)
            ours = {name: build_trainer(case, name, device) for name in STRATEGIES}
            written = [
                pair.managed.fqns[0]
                for pair in ours["optim_grads_params"].wrapper.engine.pairs
                if pair.managed.writer is WgradProtocol.ACCUMULATES
            ]
            assert len(written) == 4 * case.num_layers + 1, written
            for strategy, mine, theirs in steps_from_reference(reference, ours, rank, 2, device):
                check_step(mine, theirs, f"{strategy} on {world} ranks, {reference_case}")


def test_fused_and_unfused_stock_ddp_take_the_same_steps() -> None:
    """Untied and tied (a weight that the output layer adds to, and autograd for the embedding)."""
    run_ranks(_compare, 2)


def _forget_to_zero(rank: int, world: int) -> None:
    """What the comparison above must see: a bucket that is added to without having been zeroed."""
    from megatron_fsdp_adapter.core.engine.wgrad import FusedWgrad

    def careless(self: FusedWgrad, empty: bool) -> None:
        self.is_open, self._written = True, set(self._adding)

    FusedWgrad.open = careless  # type: ignore[method-assign]
    _compare(rank, world)


def test_a_bucket_that_is_not_zeroed_is_seen() -> None:
    with pytest.raises(Exception, match="differ|close|bound|exceed|nan"):
        run_ranks(_forget_to_zero, 2)


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
