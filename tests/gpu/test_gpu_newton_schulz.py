"""Newton-Schulz at real width: errors, bits in a batch, and what products take."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.sharding.muon import symmetric
from megatron_fsdp_adapter.sharding.muon.newton_schulz import (
    coefficients_of,
    cost,
    orthogonalized,
)
from megatron_fsdp_adapter.sharding.muon.symmetric import symmetric_product
from tests.gpu.gpu_ranks import Check, Outcomes

QUINTIC = coefficients_of("quintic", 5)
SHAPES = ((4096, 4096), (1024, 4096), (4096, 14336), (14336, 4096), (1000, 4104))


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
    assert symmetric._kernel(torch.device("cuda", torch.cuda.current_device())) is not None
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
        got = orthogonalized(given[None], QUINTIC)[0]
        got = got if shape == (small, large) else got.T
        ours = float((got.double() - wanted).norm() / norm)
        assert ours <= max(1.1 * theirs, 3e-3), (kind, ours, theirs)
        found.append(f"{kind} off by {ours:.5f}, plain bf16 by {theirs:.5f}")
        del wanted
    given = noise.bfloat16() if shape == (small, large) else noise.T.contiguous().bfloat16()
    both = orthogonalized(torch.stack([given, given.flip(0)]), QUINTIC)
    alone = orthogonalized(given[None], QUINTIC)
    found.append(f"same bits in a batch: {torch.equal(both[:1], alone)}")
    del both, alone
    for _ in range(2):  # a warm-up, and what counts: with one wait for the device in ten
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            orthogonalized(given[None], QUINTIC)
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


CHECKS: dict[str, Check] = {f"products of {s}": Check(products, (s,)) for s in SHAPES}
OUTCOMES = Outcomes(CHECKS, timeout_s=240.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
