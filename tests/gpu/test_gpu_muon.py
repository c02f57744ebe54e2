"""Muon on two GPUs: torch's own on whole matrices of real width, Megatron's under every strategy,
and what a step takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.sharding.muon.newton_schulz import (
    coefficients_of,
    cost,
    orthogonalised,
)
from megatron_fsdp_adapter.sharding.muon.symmetric import symmetric_product
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
QUINTIC = coefficients_of("quintic", 5)
SHAPES = ((4096, 4096), (1024, 4096), (4096, 14336), (14336, 4096), (1000, 4100))
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
    started = {name: param.detach().clone() for name, param in whole.named_parameters()}
    for _ in range(2):
        model(torch.ones(1, 4096, device="cuda")).sum().backward()
        for (_, param), mine in zip(whole.named_parameters(), model.parameters(), strict=True):
            param.grad = torch.randn(param.shape, generator=generator, device="cuda")
            ref = mine.fsdp_layout_ref
            held = ref.layout.shard_range(ref.index, ref.rank)
            own = mine.grad._local_tensor
            own.copy_(param.grad.view(-1)[held.start : held.stop].view(own.shape))
        reference.step()
        muon.step()
        muon.zero_grad()
    worst = 0.0
    for (name, param), mine in zip(whole.named_parameters(), model.parameters(), strict=True):
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


def exact(x: torch.Tensor) -> torch.Tensor:
    """The steps as they are written down, in the dtype of `x`."""
    x = x / x.norm()
    for a, b, c in QUINTIC:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def products(rank: int, world: int, shape: tuple[int, int]) -> str:
    """Of matrices of real width: the error beside that of plain steps in bf16, the same bits alone
    and in a batch, and the time."""
    generator = torch.Generator("cuda").manual_seed(shape[0])
    small, large = sorted(shape)
    noise = torch.randn(small, large, device="cuda", generator=generator)
    turned = torch.linalg.qr(torch.randn(small, small, device="cuda", generator=generator))[0]
    decades = torch.logspace(0, -4, small, device="cuda")[:, None]
    found = []
    for kind, matrix in {
        "noise": noise, "four decades": turned @ (noise * decades), "one": noise[:, :1] @ noise[:1],
    }.items():  # fmt: skip
        x = matrix.bfloat16()
        wanted = exact(x.double())
        norm = wanted.norm()
        theirs = float((exact(x).double() - wanted).norm() / norm)
        given = x if shape == (small, large) else x.T.contiguous()
        got = orthogonalised(given[None], QUINTIC)[0]
        got = got if shape == (small, large) else got.T
        ours = float((got.double() - wanted).norm() / norm)
        assert ours <= max(1.1 * theirs, 3e-3), (kind, ours, theirs)
        found.append(f"{kind} off by {ours:.5f}, plain bf16 by {theirs:.5f}")
        del wanted
    given = noise.bfloat16() if shape == (small, large) else noise.T.contiguous().bfloat16()
    both = orthogonalised(torch.stack([given, given.flip(0)]), QUINTIC)
    alone = orthogonalised(given[None], QUINTIC)
    found.append(f"same bits in a batch: {torch.equal(both[:1], alone)}")
    del both, alone
    for _ in range(2):  # a warm-up, and what counts: with one wait for the device in ten
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            orthogonalised(given[None], QUINTIC)
        launched = time.perf_counter() - began
        torch.cuda.synchronize()
        spent = (time.perf_counter() - began) / 10
    rate = cost(*shape) / spent / 1e12
    found.append(f"{1e3 * spent:.2f} ms, host {100 * launched:.2f} ms, {rate:.0f} TFLOP/s of what "
                 "has to be computed")  # fmt: skip
    for name, made in PRODUCTS.items():
        x = given[None].half()
        spent = time_of(functools.partial(made, x, shape[0] > shape[1]))
        found.append(f"{name} {1e3 * spent:.0f} us")
    return f"{shape}: " + "; ".join(found)


def time_of(made: Callable[[], Any], repeats: int = 20) -> float:
    """ms of one of `repeats` that the device does one after the other."""
    made()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)  # the host is ahead
    began.record()
    for _ in range(repeats):
        made()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / repeats


def gram_of(x: torch.Tensor, tall: bool) -> torch.Tensor:
    return symmetric_product(x, tall=tall)


def whole_gram_of(x: torch.Tensor, tall: bool) -> torch.Tensor:
    return torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)


def times_small(x: torch.Tensor, tall: bool) -> torch.Tensor:
    small = min(x.shape[1:])
    square = x[:, :small, :small].contiguous()
    return torch.bmm(x, square) if tall else torch.bmm(square, x)


def small_of(x: torch.Tensor, tall: bool) -> torch.Tensor:
    small = min(x.shape[1:])
    square = x[:, :small, :small].contiguous()
    return symmetric_product(square, square, square, 0.5, 1e-3, 2.0)


PRODUCTS: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {
    "Gram matrix": gram_of, "the same whole": whole_gram_of, "Q X": times_small,
    "small symmetric": small_of,
}  # fmt: skip


CHECKS: dict[str, Check] = {
    **{f"torch's, {s}": Check(as_torch, (s,)) for s in ("no_shard", "optim_grads_params")},
    **{f"Megatron's, {s}": Check(as_written_down, (s,)) for s in STRATEGIES},
    "time of steps": Check(time_of_steps),
    **{f"products of {s}": Check(products, (s,)) for s in SHAPES},
}
OUTCOMES = Outcomes(CHECKS, timeout_s=240.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)


def test_the_checks_are_named_once() -> None:
    arguments: list[Any] = [(check.function, check.arguments) for check in CHECKS.values()]
    assert len(arguments) == len(set(arguments))
