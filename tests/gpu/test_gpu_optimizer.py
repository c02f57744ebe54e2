"""Steps of optimizers on two GPUs. Adam in one pass has the bits of Transformer Engine's behind
core's clipping, by itself and in training at the real width. Muon: Megatron's under every strategy,
and its products at the real width.

    python -m pytest -q -rA tests/gpu/test_gpu_optimizer.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.optim import fused_adam
from megatron_fsdp_adapter.optim import step as step_module
from megatron_fsdp_adapter.optim.multi_tensor import CHUNK
from megatron_fsdp_adapter.optim.muon import newton_schulz
from megatron_fsdp_adapter.optim.muon.newton_schulz import (
    coefficients_of,
    orthogonalized,
)
from tests.lib.gpt.checks import Step, check_run_bits
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
)
from tests.lib.gpt.muon_reference import Reference, is_muons
from tests.lib.gpu.gpu_ranks import NEEDS, Check, Outcomes, expecting
from tests.lib.gpu.runs import ZERO_3, Fields, local_run, run_of

CHECKS = (
    "optim/fused_adam.py",
    "optim/triton_adam.py",
    "optim/multi_tensor.py",
    "optim/muon/newton_schulz.py",
    "optim/muon/triton_symmetric.py",
)

SIZES = (1_000_003, 4096 * 33, 7, 65536 * 2 + 1, 1, CHUNK * 3)
FLOAT32 = torch.float32
BF16 = torch.bfloat16
CLIPPED = Case(
    num_layers=2,
    hidden=4096,
    heads=32,
    ffn=11008,
    vocab=8192,
    seq=4096,
    batch=1,
    microbatches=1,
    bf16=True,
    swiglu=True,
    bias=False,
    recompute="full-1",
    clip=0.05,
)
DTYPES = [
    (FLOAT32, FLOAT32, FLOAT32),
    (BF16, FLOAT32, FLOAT32),
    (BF16, FLOAT32, BF16),
    (FLOAT32, BF16, FLOAT32),
    (BF16, BF16, BF16),
]


def _refuse(*arguments: Any) -> None:
    raise AssertionError("the kernel did not take these")


def _adam(original: Callable[..., Any] = _refuse) -> fused_adam.FusedAdamStep:
    return fused_adam.FusedAdamStep(original, fused_adam.kernel_of)


def _scale(grads: list[torch.Tensor], factor: float | None) -> None:
    """In float32, as core's clipping."""
    for grad in grads:
        if factor is not None:
            grad.copy_((grad.float() * factor).to(grad.dtype))


def _equal(rows: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    return all(all(map(torch.equal, row, other)) for row, other in zip(rows, others, strict=True))


def _tensors(
    grads: torch.dtype,
    weights: torch.dtype,
    moments: torch.dtype,
    sizes: tuple[int, ...],
    scale: float,
    skip: int,
) -> list[list[torch.Tensor]]:
    made = []
    for dtype, width in (
        (grads, 1e-3 * scale),
        (weights, 1.0),
        (moments, 1e-3 * scale),
        (moments, 1e-6 * scale**2),
    ):
        found = [(torch.randn(n + skip, device="cuda") * width).to(dtype)[skip:] for n in sizes]
        made.append(found)
    made[3] = [tensor.abs() for tensor in made[3]]
    return made


@pytest.mark.skipif(not NEEDS["te"][0](), reason=NEEDS["te"][1])
@pytest.mark.parametrize(("grads", "weights", "moments"), DTYPES)
def test_bits_of_transformer_engine(
    grads: torch.dtype, weights: torch.dtype, moments: torch.dtype
) -> None:
    """Decoupled decay and the other, clipped and not, subnormal numbers, addresses that allow long
    reads and that do not, several steps."""
    import transformer_engine.pytorch  # noqa: F401  finds the extension
    import transformer_engine_torch as tex

    adam = _adam()
    overflow = torch.zeros(1, dtype=torch.int, device="cuda")
    even = (8192, 4096 * 64, 24)
    for mode, factor, scale, (sizes, skip) in itertools.product(
        (1, 0), (None, 0.37), (1.0, 1e-18), ((SIZES, 0), (even, 0), (even, 1))
    ):
        ours = _tensors(grads, weights, moments, sizes, scale, skip)
        theirs = [[tensor.clone() for tensor in row] for row in ours]
        adam.clip = None if factor is None else torch.full((), factor, device="cuda")
        _scale(theirs[0], factor)
        for step in (1, 2, 7, 1000):
            rest = (3e-2, 0.9, 0.95, 1e-8, step, mode, 1, 0.1)
            adam(65536, overflow, ours, *rest)
            tex.multi_tensor_adam(65536, overflow, theirs, *rest)
            assert _equal(ours[1:], theirs[1:]), (mode, factor, scale, sizes, skip, step)


def trains_alike(rank: int, world: int, strategy: str, ddp: Fields) -> str:
    """With the kernel, and with Transformer Engine's behind core's clipping."""
    runs: list[list[Step]] = []

    def look(trainer: Trainer) -> None:
        shards = distributed_optimizer(trainer).optimizer._fsdp_shards
        assert (shards.fused_step is None) == bool(runs)
        assert runs or shards.fused_step.known, "nothing went through the kernel"

    for install in (fused_adam.install, lambda optimizer: None):
        with mock.patch.object(step_module, "install", install):
            runs.append(run_of(CLIPPED, strategy, rank, 3, ddp, local_run, look)[0])
    check_run_bits(runs[0], runs[1], strategy)
    assert min(step.norm for step in runs[0]) > CLIPPED.clip
    return f"norms {[round(step.norm, 3) for step in runs[0]]}"


# Muon.

UNEVEN = Case(
    num_layers=3, hidden=264, heads=4, ffn=680, vocab=1003, seq=64, bf16=True, swiglu=True
)


def as_written_down(rank: int, world: int, strategy: str) -> str:
    """Megatron's optimizer, with the gradients that it had."""
    device = init_megatron()
    case = UNEVEN.but(clip=0.1)
    trainer = build_trainer(case, strategy, device, optimizer={"optimizer": "muon"})
    reference = Reference(
        trainer.wrapper.config,
        case.lr,
        case.weight_decay,
        case.adam_eps,
        case.clip,
        torch.bfloat16,
    )
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


# Newton-Schulz at real width: errors, and bits in a batch.

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
    """Of matrices of real width: the error beside that of plain steps in bf16, and the same bits
    alone and in a batch."""
    assert newton_schulz._kernel(torch.device("cuda", torch.cuda.current_device())) is not None
    generator = torch.Generator("cuda").manual_seed(shape[0])
    small, large = sorted(shape)
    noise = torch.randn(small, large, device="cuda", generator=generator)
    turned = torch.linalg.qr(torch.randn(small, small, device="cuda", generator=generator))[0]
    decades = torch.logspace(0, -4, small, device="cuda")[:, None]
    found = []
    for kind, matrix in {
        "noise": noise,
        "four decades": turned @ (noise * decades),
        "one": noise[:, :1] @ noise[:1],
    }.items():
        x = matrix.bfloat16()
        wanted = exact(x.double())
        norm = wanted.norm()
        theirs = float((exact(x).double() - wanted).norm() / norm)
        if shape == (small, large):
            given = x
        else:
            given = x.T.contiguous()
        got = orthogonalized(given[None], QUINTIC)[0]
        got = got if shape == (small, large) else got.T
        ours = float((got.double() - wanted).norm() / norm)
        assert ours <= max(1.1 * theirs, 3e-3), (kind, ours, theirs)
        found.append(f"{kind} off by {ours:.5f}, plain bf16 by {theirs:.5f}")
        del wanted
    if shape == (small, large):
        given = noise.bfloat16()
    else:
        given = noise.T.contiguous().bfloat16()
    both = orthogonalized(torch.stack([given, given.flip(0)]), QUINTIC)
    alone = orthogonalized(given[None], QUINTIC)
    found.append(f"same bits in a batch: {torch.equal(both[:1], alone)}")
    return f"{shape}: " + "; ".join(found)


ADAM = {
    "ZeRO-3": Check(trains_alike, (ZERO_3, {})),
    "optim": Check(trains_alike, ("optim", {})),
    "streamed": Check(trains_alike, (ZERO_3, {"chunked_optimizer_state_offload": True})),
}
MUON = {
    **{f"Megatron's, {s}": Check(as_written_down, (s,)) for s in STRATEGIES},
    **{f"products of {s}": Check(products, (s,)) for s in SHAPES},
}
ADAM_OUTCOMES = Outcomes(ADAM, timeout_s=150.0, needs=("te",))
MUON_OUTCOMES = Outcomes(MUON, timeout_s=300.0)

test_adam_in_one_pass_trains_alike = expecting(ADAM_OUTCOMES)
test_muon = expecting(MUON_OUTCOMES)
