"""Dtypes of gradients, communication and moments with Transformer Engine's FusedAdam on NCCL; and
copy engines that carry gradients as autograd gives them, at a width that is used.

    python -m pytest -q -rA tests/gpu/test_gpu_precision.py      (two GPUs)
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.comm.all_to_all_sum import reduce_scatter
from megatron_fsdp_adapter.core.comm.communicator import Communicator
from megatron_fsdp_adapter.core.config import EngineConfig
from megatron_fsdp_adapter.core.kernels.sums import WIDE, _kernel, copy_large, sum_rows
from megatron_fsdp_adapter.core.topology import DENSE
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.lib.gpt.checks import check_run_bits
from tests.lib.gpt.exact import DTYPES, gamma, is_rounded_once
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    init_megatron,
    train_step,
)
from tests.lib.gpt.precision import check_cell, pairwise
from tests.lib.gpu.gpu_ranks import Check, Outcomes, expecting
from tests.lib.gpu.runs import COPY_ENGINES, ZERO_3, local_run, run_of

CHECKS = (
    "core/engine/reduce.py",
    "core/comm/all_to_all_sum.py",
    "core/kernels/sums.py",
    "core/kernels/triton_sums.py",
)

BF16 = torch.bfloat16
FP32 = torch.float32
CASE = Case(
    num_layers=2,
    hidden=256,
    heads=4,
    ffn=640,
    vocab=512,
    seq=64,
    batch=2,
    bf16=True,
    swiglu=True,
    microbatches=2,
    lr=1e-3,
)
STEPS = 20

POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # fields of the DDP config, fields of the optimizer config
    "defaults": ({}, {}),
    "bf16 communication": ({"megatron_fsdp_grad_comm_dtype": BF16}, {}),
    "bf16 communication, fp32 sums": (
        {"megatron_fsdp_grad_comm_dtype": BF16, "reduce_scatter_with_fp32_accumulation": True},
        {},
    ),
    "bf16 gradients": (
        {"megatron_fsdp_main_grads_dtype": BF16},
        {"use_precision_aware_optimizer": True},
    ),
    "bf16 gradients and moments": (
        {"megatron_fsdp_main_grads_dtype": BF16},
        {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": BF16,
            "exp_avg_dtype": BF16,
            "exp_avg_sq_dtype": BF16,
        },
    ),
    "all bf16": (
        {"megatron_fsdp_main_params_dtype": None, "megatron_fsdp_main_grads_dtype": BF16},
        {"use_precision_aware_optimizer": True},
    ),
}


def _trainer(strategy: str, name: str, device: torch.device) -> Trainer:
    ddp, options = POLICIES[name]
    return build_trainer(CASE, strategy, device, ddp=ddp, optimizer=options)


def _state_bytes(trainer: Trainer) -> int:
    """Of every tensor of the inner optimizer's state, each storage once; empty shards have none."""
    storages = {}
    for state in trainer.optimizer.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                local = getattr(value, "_local_tensor", value)
                storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


def trains(rank: int, world: int, strategy: str, name: str) -> str:
    """The loss of one batch falls as with the defaults, and optimizer state is two moments of this
    rank's elements in their dtypes, and nothing else."""
    device = init_megatron()
    data = batches(CASE, 0, rank, device)
    losses = {}
    for policy in ("defaults", name):
        trainer = _trainer(strategy, policy, device)
        losses[policy] = [train_step(trainer, data)[0] for _ in range(STEPS)]
    first = losses[name][0]
    last = losses[name][-1]
    fallen = first - last
    expected = losses["defaults"][0] - losses["defaults"][-1]
    assert abs(first - losses["defaults"][0]) <= 2e-3 * first, losses
    assert fallen > 0.8 * expected > 0, losses
    trainer.wrapper.stop_communication()
    held = sum(param._local_tensor.numel() for param in trainer.wrapper.parameters())
    moment = POLICIES[name][1].get("exp_avg_dtype", FP32)
    assert _state_bytes(trainer) == 2 * held * moment.itemsize
    return f"{first:.4f} -> {last:.4f}, defaults -> {losses['defaults'][-1]:.4f}"


def matrix(rank: int, world: int) -> str:
    """The cells of the CPU matrix of this world, on NCCL."""
    cells = [cell for cell in pairwise() if cell.world == world]
    init_megatron()
    for cell in cells:
        check_cell(cell, rank)
    return f"{len(cells)} cells"


def one_reduction(rank: int, world: int) -> str:
    """bf16 on the wire: sums in float32 are within float32's bound of the exact sum."""
    device = init_megatron()
    group: Any = dist.group.WORLD
    communicator = Communicator(group, device)
    torch.manual_seed(rank)
    grads = torch.randn(1 << 20, device=device).bfloat16()
    exact = grads.double()
    size = grads.double().abs()
    dist.all_reduce(exact)
    dist.all_reduce(size)
    own = exact.view(world, -1)[rank]
    scale = size.view(world, -1)[rank]
    output = torch.empty(grads.numel() // world, device=device)
    assert reduce_scatter(communicator, [(output, grads)]) == []
    torch.cuda.synchronize()
    assert ((output.double() - own).abs() <= gamma(world, 2.0**-24) * scale).all()
    return f"largest error {(output.double() - own).abs().max().item():.2e}"


def sums_of_rows(rank: int, world: int) -> str:
    """The kernel, where there is one: rounded once, rows that begin anywhere, any number of them,
    more elements than 32 bits count."""
    device = init_megatron()
    torch.manual_seed(rank)
    assert _kernel(device) is not None, "Triton comes with this torch"
    for count, numel in ((1, 5), (2, 1 << 20), (3, 4099), (4, 6144), (8, 12345), (5, 0)):
        for sent, kept in itertools.product(DTYPES, repeat=2):
            for scale, accumulate in itertools.product((1.0, 1 / 3), (False, True)):
                rows = torch.randn(count, numel, device=device).to(sent)
                output = torch.randn(numel + 1, device=device).to(kept)[1:]
                case = (count, numel, sent, kept, scale, accumulate)
                assert is_rounded_once(rows, output, scale, accumulate), case
    rows = torch.ones(2, (1 << 30) + 5, dtype=torch.bfloat16, device=device)
    rows[1] = 2.0
    output = torch.empty(rows.shape[1], device=device)
    sum_rows(rows, output)
    assert bool((output == 3.0).all())
    for value in torch.randn(3, WIDE + 5, device=device).bfloat16().unbind():
        copy_large(output[: WIDE + 5], value)
        assert torch.equal(output[: WIDE + 5], value.float())
    return "all within one rounding"


# Narrow buckets of copy engines: the bits of float32 pieces.

RECOMPUTED = Case(
    num_layers=3,
    hidden=4096,
    heads=32,
    ffn=11008,
    vocab=8192,
    seq=4096,
    batch=1,
    microbatches=2,
    bf16=True,
    swiglu=True,
    bias=False,
    recompute="full-1",
)
"""Recomputed, as the local attention of the tests keeps all its scores."""


def narrow_buckets_have_the_same_bits(rank: int, world: int, fused: bool) -> str:
    """With fused weight gradients the embedding and the root have narrow buckets, and layers not:
    their products end in float32."""
    if fused:
        patches.install(FUSED_WGRAD)
    case = RECOMPUTED.but(fused=fused)
    runs = []
    received = []

    def look(trainer: Trainer) -> tuple[set[torch.dtype], int]:
        engine = trainer.wrapper.engine
        received: Any = engine.reduce.domains[DENSE].received
        return {g.grads.bucket.tensor.dtype for g in engine.groups}, received.nbytes

    for wide in (True, False):
        with mock.patch.object(EngineConfig, "narrows_buckets", False) if wide else nullcontext():
            steps, (dtypes, numel) = run_of(case, ZERO_3, rank, 2, COPY_ENGINES, local_run, look)
        runs.append(steps)
        received.append(numel)
        assert (torch.bfloat16 in dtypes) is not wide, dtypes
        assert (torch.float32 in dtypes) is (wide or fused), dtypes
    check_run_bits(runs[1], runs[0], f"fused={fused}")
    assert fused or received[0] == 2 * received[1], received
    return f"received pieces: {received[0] / 2**20:.0f} MiB, {received[1] / 2**20:.0f} narrow"


DEVICE_CHECKS = {
    **{
        f"{strategy}, {name}": Check(trains, (strategy, name))
        for strategy in STRATEGIES
        for name in POLICIES
        if name != "defaults" and (strategy != "no_shard" or "sums" not in name)
    },
    "matrix": Check(matrix),
    "one reduction": Check(one_reduction),
    "sums of rows": Check(sums_of_rows),
}
NARROW = {
    name: Check(narrow_buckets_have_the_same_bits, (name == "fused",))
    for name in ("unfused", "fused")
}
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=170.0, needs=("te",))
NARROW_OUTCOMES = Outcomes(NARROW, timeout_s=150.0)

test_on_two_gpus = expecting(OUTCOMES)
test_narrow_buckets = expecting(NARROW_OUTCOMES)
