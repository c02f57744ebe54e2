"""Muon on two GPUs: torch's own on whole matrices of real width, Megatron's under every strategy,
and what a step takes. `test_gpu_newton_schulz.py` has the products."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
)
from tests.distributed.muon_reference import Reference, is_muons
from tests.gpu.gpu_ranks import Check, Outcomes

LR = 0.02
UNEVEN = Case(num_layers=3, hidden=264, heads=4, ffn=680, vocab=1003, seq=64, bf16=True,
              swiglu=True)  # fmt: skip
WIDE = Case(
    num_layers=4, hidden=4096, heads=32, ffn=14336, vocab=8192, seq=4096, batch=1, microbatches=1,
    bf16=True, swiglu=True, bias=False,
)  # fmt: skip


class Layer(nn.Module):
    """The matrices of a layer of Llama-3 8B, none of them fused."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4096, 4096, False), nn.Linear(4096, 1024, False)
        self.up, self.down = nn.Linear(4096, 14336, False), nn.Linear(14336, 4096, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.query(x) + self.key(x).repeat(1, 4)))


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Layer(), Layer()).cuda()


def as_torch(rank: int, world: int, strategy: str) -> str:
    """The same gradients, of full rank, on shards and on whole matrices."""
    whole, generator = layers(), torch.Generator("cuda").manual_seed(7)
    model = fully_shard_model(
        layers(), fsdp_unit_modules=[Layer], data_parallel_sharding_strategy=strategy
    )
    reference = torch.optim.Muon(whole.parameters(), lr=LR)
    muon = fully_shard_optimizer(torch.optim.Muon(model.parameters(), lr=LR))
    sharded: list[Any] = list(model.parameters())
    started = {name: param.detach().clone() for name, param in whole.named_parameters()}
    for _ in range(2):
        model(torch.ones(1, 4096, device="cuda")).sum().backward()
        for (_, param), mine in zip(whole.named_parameters(), sharded, strict=True):
            param.grad = torch.randn(param.shape, generator=generator, device="cuda")
            ref = mine.fsdp_layout_ref
            held = ref.layout.shard_range(ref.index, ref.rank)
            own = mine.grad._local_tensor
            own.copy_(param.grad.view(-1)[held.start : held.stop].view(own.shape))
        reference.step()
        muon.step()
        muon.zero_grad()
    worst = 0.0
    for (name, param), mine in zip(whole.named_parameters(), sharded, strict=True):
        ref = mine.fsdp_layout_ref
        held = ref.layout.shard_range(ref.index, ref.rank)
        if held.empty:
            continue
        expected = (param.detach() - started[name]).view(-1)[held.start : held.stop]
        got = mine._local_tensor.view(-1) - started[name].view(-1)[held.start : held.stop]
        worst = max(worst, float((got - expected).norm() / expected.norm()))
    assert worst < 0.05, worst
    return f"{strategy}: updates differ from torch's by {worst:.4f} in norm"


def as_written_down(rank: int, world: int, strategy: str) -> str:
    """Megatron's optimizer, with the gradients that it had."""
    device, case = init_megatron(), UNEVEN.but(clip=0.1)
    trainer = build_trainer(case, strategy, device, optimizer={"optimizer": "muon"})
    reference = Reference(
        trainer.wrapper.config, case.lr, case.weight_decay, case.adam_eps, case.clip,
        torch.bfloat16,
    )  # fmt: skip
    worst = 0.0
    for step in range(3):
        before = trainer.params()
        forward_backward(trainer, batches(case, step, rank, device))
        gradients = trainer.gradients()
        done, norm, _ = trainer.optimizer.step()
        assert done
        expected = reference.step(before, before, gradients, float(norm))
        for name, value in trainer.params().items():
            error = float((value - expected[name]).abs().max())
            if is_muons(name, value):
                scaled = error / (case.lr * max(value.shape) ** 0.5)
                worst = max(worst, scaled)
            else:
                assert error <= 1e-4, (name, error)
    assert worst < 0.15, worst
    return f"{strategy}: entries of updates off by {worst:.4f} at most"


def time_of_steps(rank: int, world: int) -> str:
    """Of Adam and of Muon, with layers of Llama-3 8B; the first update is orthogonal."""
    device = init_megatron()
    found = []
    for options in ({}, {"optimizer": "muon", "muon_extra_scale_factor": 0.2}):
        trainer = build_trainer(WIDE, "optim_grads_params", device, optimizer=options)
        times = []
        torch.cuda.reset_peak_memory_stats()
        for step in range(4):
            forward_backward(trainer, batches(WIDE, step, rank, device))
            torch.cuda.synchronize()
            began, before = time.perf_counter(), torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            trainer.optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            peak = torch.cuda.max_memory_allocated() - before
        found.append(
            f"{options.get('optimizer', 'adam')}: {1e3 * min(times[1:]):.1f} ms, "
            f"{peak / 2**30:.2f} GiB more in a step"
        )
        del trainer
    return "; ".join(found)


CHECKS: dict[str, Check] = {
    **{f"torch's, {s}": Check(as_torch, (s,)) for s in ("no_shard", "optim_grads_params")},
    **{f"Megatron's, {s}": Check(as_written_down, (s,)) for s in STRATEGIES},
    "time of steps": Check(time_of_steps),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=240.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)


def test_the_checks_are_named_once() -> None:
    arguments: list[Any] = [(check.function, check.arguments) for check in CHECKS.values()]
    assert len(arguments) == len(set(arguments))
