"""Experts on one data-parallel rank each, at real width: under ZeRO-3 they have no bucket, and
train as under `optim`, bit for bit where two runs of `optim` agree."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.core.topology import EXPERT
from megatron_fsdp_adapter.sharding.unsharded_budget import OPTION
from tests.distributed.checks import relative
from tests.distributed.gpt import Case, batches, train_step
from tests.gpu import test_gpu_moe as moe
from tests.gpu.gpu_ranks import Check, Outcomes

CASE = Case(
    num_layers=2, hidden=4096, heads=32, ffn=14336, vocab=1000, seq=1024, batch=1, swiglu=True,
    bias=False, bf16=True, microbatches=3, lr=1e-4,
)  # fmt: skip
KIND = moe.KINDS["TEGroupedMLP, bf16"]
ZERO_1, ZERO_3 = "optim", "optim_grads_params"
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
FUSED = "alltoall, fused"
DISPATCHERS = {
    FUSED: {"moe_token_dispatcher_type": "alltoall", "gradient_accumulation_fusion": True}
}
NEAR = 2e-2
"""Relative, of losses and norms whose sums are in other orders: a token may change its expert."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "slots": {"fsdp_double_buffer": True},
    "parts": {"megatron_fsdp_enable_fine_grained_param_gather": True},
}
Run = tuple[list[tuple[float, float]], dict[str, torch.Tensor], float]


def _run(rank: int, dispatcher: str, strategy: str, ddp: Mapping[str, Any]) -> Run:
    """(loss, norm) of three steps, this rank's main weights of experts after, peak in GiB."""
    device = moe.init_experts()
    torch.cuda.reset_peak_memory_stats()
    with (
        mock.patch.object(moe, "CASE", CASE), mock.patch.dict(os.environ, DETERMINISTIC),
        mock.patch.object(moe, "DISPATCHERS", {**moe.DISPATCHERS, **DISPATCHERS}),
    ):  # fmt: skip
        trainer = moe._trainer(KIND, dispatcher, strategy, device, ddp)
        steps = [train_step(trainer, batches(CASE, step, rank, device)) for step in range(3)]
    trainer.wrapper.stop_communication()
    engine = trainer.wrapper.engine
    experts = [group for group in engine.groups if group.key.domain == EXPERT]
    assert experts and all(group.bucket is group.grad for group in experts)
    assert all(group.is_single_rank == (strategy == ZERO_3) for group in experts)
    engine.to_sharded()
    weights = {
        pair.managed.fqns[0]: pair.sharded._local_tensor.cpu().clone()
        for pair in engine.pairs if pair.group.key.domain == EXPERT
    }
    peak = torch.cuda.max_memory_allocated() / 2**30
    del trainer, engine, experts
    gc.collect()
    torch.cuda.empty_cache()
    return steps, weights, peak


def _differing(one: Run, other: Run) -> int:
    return sum(not torch.equal(one[1][name], value) for name, value in other[1].items())


def trains_as_optim(rank: int, world: int, name: str, dispatcher: str) -> str:
    """Everything else is kept by a budget, so that all sums are in one order."""
    expected, again = (_run(rank, dispatcher, ZERO_1, {}) for _ in range(2))
    found = _run(rank, dispatcher, ZERO_3, {**OPTIONS[name], OPTION: 100.0})
    plain = _run(rank, dispatcher, ZERO_3, OPTIONS[name])
    same = expected[0] == again[0] and _differing(expected, again) == 0
    told = (
        f"two runs of optim {'agree' if same else 'differ'}; steps {expected[0]}, {found[0]}, "
        f"{plain[0]}; peaks {expected[2]:.2f}, {found[2]:.2f}, without budget {plain[2]:.2f} GiB"
    )
    if same:
        assert found[0] == expected[0] and _differing(found, expected) == 0, told
    for run in (found, plain):
        for mine, theirs in zip(run[0], expected[0], strict=True):
            assert all(relative(a, b) <= NEAR for a, b in zip(mine, theirs, strict=True)), told
    return told


CHECKS = {
    name: Check(trains_as_optim, (name, dispatcher))
    for name, dispatcher in (
        ("plain", "alltoall"), ("slots", FUSED), ("parts", FUSED),
    )
}
OUTCOMES = {name: Outcomes({name: check}, timeout_s=150.0) for name, check in CHECKS.items()}
"""Processes for each: what core's experts have trained stays in memory, under its DDP as well."""


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES[name].expect(name)
