"""Gradients in 8-bit blocks on GPUs: the kernels write what torch writes on the host, training has
the same bits with and without copy engines, and follows training in float32."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.runtime import blocks
from megatron_fsdp_adapter.core.runtime.block_format import row_bytes
from megatron_fsdp_adapter.sharding.budget import OPTION as BUDGET
from tests.distributed.checks import check_run_bits, free_run
from tests.distributed.gpt import Case, build_trainer, init_megatron
from tests.gpu.gpu_ranks import Check, Outcomes

CASE = Case(
    num_layers=5, hidden=256, heads=4, ffn=640, vocab=1000, seq=128, batch=2, swiglu=True,
    bf16=True, microbatches=2,
)  # fmt: skip
BLOCKS = {"fsdp_grad_comm_fp8_blocks": True}
COPY_ENGINES = {"fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "slots": {"fsdp_double_buffer": True},
    "copy engines": COPY_ENGINES,
    "copy engines, some units whole": {**COPY_ENGINES, BUDGET: 0.004},
}


def kernels(rank: int, world: int) -> str:
    """Bytes are the host's; sums too, but for a product and a sum that are one operation."""
    assert blocks._kernels(torch.device("cuda", torch.cuda.current_device())) is not None
    for seed, (count, numel) in enumerate([(2, 31), (2, 2048), (3, 100_003), (8, 1 << 20)]):
        generator = torch.Generator().manual_seed(seed)
        powers = torch.randint(-40, 40, (count, numel), generator=generator)
        source = torch.ldexp(torch.randn(count, numel, generator=generator), powers)
        source[0, ::1000] = float("nan") if seed % 2 else 0.0
        rows = torch.zeros(count, row_bytes(numel), dtype=torch.uint8)
        on_gpu = torch.zeros_like(rows, device="cuda")
        blocks.encode(source, rows)
        blocks.encode(source.cuda(), on_gpu)
        assert torch.equal(on_gpu.cpu(), rows), (count, numel)
        before = torch.randn(numel, generator=generator)
        for accumulate in (False, True):
            host, device = before.clone(), before.cuda()
            blocks.sum_encoded(rows, host, 1 / 3, accumulate)
            blocks.sum_encoded(on_gpu, device, 1 / 3, accumulate)
            torch.testing.assert_close(device.cpu(), host, rtol=1e-6, atol=1e-6, equal_nan=True)
    return "equal bytes"


def _run(rank: int, strategy: str, ddp: dict[str, Any], steps: int = 4) -> Any:
    device = init_megatron()
    trainer = build_trainer(CASE, strategy, device, ddp=ddp)
    found = free_run(trainer, rank, steps, device)
    del trainer
    gc.collect()
    return found


def trains(rank: int, world: int, name: str) -> str:
    options = {**OPTIONS[name], **BLOCKS}
    found = _run(rank, "optim_grads_params", options)
    if BUDGET not in options:
        plain = _run(rank, "optim_grads_params", BLOCKS)
        check_run_bits(found, plain, name)
    exact = _run(rank, "optim_grads_params", {})
    assert found[0].loss == exact[0].loss
    off = max(abs(a.loss / b.loss - 1) for a, b in zip(found, exact, strict=True))
    assert 0 < off < 1e-2, off
    return f"losses within {off:.2e} of those in float32"


CHECKS = {
    "kernels": Check(kernels), **{name: Check(trains, (name,)) for name in OPTIONS},
}  # fmt: skip
OUTCOMES = Outcomes(CHECKS, timeout_s=120.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
