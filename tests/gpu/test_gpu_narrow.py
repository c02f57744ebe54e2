"""Copy engines that carry gradients as autograd gives them, at a width that is used: the bits of
float32 pieces, on two GPUs.

    python -m pytest -q -rA tests/gpu/test_gpu_narrow.py
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.distributed.checks import check_run_bits
from tests.distributed.gpt import Case, build_trainer, init_megatron
from tests.gpu.gpu_ranks import Check, Outcomes
from tests.gpu.test_gpu_optimizer_offload import _local_run

CASE = Case(
    num_layers=3, hidden=4096, heads=32, ffn=11008, vocab=8192, seq=4096, batch=1, microbatches=2,
    bf16=True, swiglu=True, bias=False, recompute="full-1",
)  # fmt: skip
"""Recomputed, as the local attention of the tests keeps all its scores."""
COPY_ENGINES = {"fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True}


def same_bits(rank: int, world: int, fused: bool) -> str:
    """With fused weight gradients the embedding and the root have narrow buckets, and layers not:
    their products end in float32."""
    device = init_megatron()
    if fused:
        patches.install(FUSED_WGRAD)
    runs, received = [], []
    for wide in (True, False):
        with mock.patch.object(EngineConfig, "narrows_buckets", False) if wide else nullcontext():
            trainer = build_trainer(
                CASE.but(fused=fused), "optim_grads_params", device, ddp=COPY_ENGINES
            )
            runs.append(_local_run(trainer, rank, 2, device))
        engine = trainer.wrapper.engine
        received.append(engine.reduce._received.numel())
        dtypes = {group.bucket.tensor.dtype for group in engine.groups}
        assert (torch.bfloat16 in dtypes) is not wide, dtypes
        assert (torch.float32 in dtypes) is (wide or fused), dtypes
        del trainer, engine
        gc.collect()
    check_run_bits(runs[1], runs[0], f"fused={fused}")
    assert fused or received[0] == 2 * received[1], received
    return f"received pieces: {received[0] / 2**20:.0f} MiB, {received[1] / 2**20:.0f} narrow"


CHECKS = {
    "unfused": Check(same_bits, (False,)),
    "fused": Check(same_bits, (True,)),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=150.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
