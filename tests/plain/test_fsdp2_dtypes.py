"""Dtypes of `fully_shard` beside torch's: of parameters, of compute, and of reductions, which each
module may have its own of. Losses, norms, gradients and weights have torch's bits and dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs

from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter.plain.call_options import SINCE_TORCH_2_15
from tests.lib.gpt.gpt import full, full_all
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "plain/fsdp2_model.py",
    "core/config.py",
    "core/engine/grad_buffers.py",
    "core/engine/grad_dtypes.py",
    "core/engine/reduction.py",
)

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
FP64 = torch.float64
WIDTH = 6

Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]
"""Of a unit: of its parameters, `param_dtype` and `reduce_dtype`."""


class Layer(nn.Module):
    """A linear layer that computes in the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).tanh()


class Stack(nn.Module):
    """Two layers, and one that the root has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


class Mixed(nn.Module):
    """A linear layer whose scale and bias may compute in another dtype than its weight. The weight
    is read twice, so that its gradients are added up in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        once = nn.functional.linear(x.to(weight.dtype), weight)
        twice = nn.functional.linear(once.tanh(), weight)
        return twice.float() * self.scale + self.linear.bias


def sharded(shard: Any, dtypes: Sequence[Dtypes], **options: Any) -> Any:
    """A stack whose layers and root have `dtypes`, in this order."""
    torch.manual_seed(7)
    made = Stack()
    parts = [*made.layers, made]
    for part, (own, _, _) in zip([*made.layers, made.head], dtypes, strict=True):
        part.to(own)
    for part, (_, computes, reduces) in zip(parts, dtypes, strict=True):
        policy = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=reduces)
        shard(part, mp_policy=policy, **options)
    return made


SYNCS = (
    ((True, True),),
    ((True, True), (True, True), (True, True)),
    ((False, False), (False, False), (True, True)),
    ((True, False), (False, False), (True, True)),
    ((True, True), (False, True), (True, True)),
    ((True, True), (False, False), (False, False)),
    ((True, True),),
)
"""Steps. Of each microbatch: whether gradients of the first layer and of others are reduced."""


def digits(made: Any, rank: int, clips: float = 0.02) -> dict[str, Any]:
    """The numbers of `SYNCS`."""
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-3)
    generator = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {}
    for step, microbatches in enumerate(SYNCS):
        for number, (first, others) in enumerate(microbatches):
            made.set_requires_gradient_sync(others)
            made.layers[0].set_requires_gradient_sync(first)
            loss = made(torch.randn(4, WIDTH, generator=generator))
            loss.backward()
            say = f"step {step}, microbatch {number}"
            found[f"{say}: loss"] = loss.item()
            for name, param in made.named_parameters():
                grad = param.grad
                values = None if grad is None else grad.to_local().clone()
                found[f"{say}: grad of {name}"] = values
        found[f"{step}: norm"] = full(nn.utils.clip_grad_norm_(made.parameters(), clips)).item()
        optimizer.step()
        optimizer.zero_grad()
        found |= {
            f"{step}: {name}": v for name, v in full_all(dict(made.named_parameters())).items()
        }
    return found


def differing(dtypes: Sequence[Dtypes], rank: int, **options: Any) -> list[str]:
    """Names of the numbers that differ from torch's."""
    expected, found = (digits(sharded(shard, dtypes, **options), rank) for shard in (theirs, ours))
    return [name for name, value in expected.items() if not same(found[name], value)]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return type(found) is type(expected) and found == expected


ALIKE: tuple[Dtypes, ...] = (
    (FP32, None, None), (FP32, None, BF16), (FP32, BF16, None), (FP32, BF16, FP32),
    (FP32, BF16, FP16), (FP32, None, FP64), (BF16, None, None), (BF16, None, FP32),
    (BF16, FP16, BF16), (FP64, None, None), (FP64, BF16, FP32),
)  # fmt: skip
"""Dtypes of all units of a model."""

MIXED: tuple[tuple[Dtypes, ...], ...] = (
    ((FP32, BF16, FP32), (FP32, BF16, None), (FP32, BF16, BF16)),
    ((FP32, None, None), (BF16, None, None), (FP32, BF16, BF16)),
    ((BF16, None, FP32), (FP32, FP16, FP16), (BF16, FP32, None)),
    ((FP16, None, None), (FP64, FP32, FP32), (BF16, None, FP16)),
)
"""Dtypes of each unit."""

EVERY = itertools.product((FP32, BF16), (None, BF16, FP16), (None, BF16, FP16, FP32))


@pytest.mark.parametrize("dtypes", [*((one,) * 3 for one in ALIKE), *MIXED], ids=str)
@on_ranks(2)
def test_units_have_their_own_dtypes(rank: int, dtypes: Sequence[Dtypes]) -> None:
    assert not differing(dtypes, rank)


@pytest.mark.full
@pytest.mark.parametrize("dtypes", sorted({*EVERY} - {*ALIKE}, key=str), ids=str)
@on_ranks(2)
def test_every_product_of_dtypes(rank: int, dtypes: Dtypes) -> None:
    assert not differing([dtypes] * 3, rank)


@pytest.mark.parametrize("dtypes", [(ALIKE[0],) * 3, MIXED[0], MIXED[2]], ids=str)
@pytest.mark.parametrize("world", (2, 4))
@on_ranks()
def test_replicas_sum_in_the_dtypes_of_torchs_function(
    rank: int, world: int, dtypes: Sequence[Dtypes]
) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    assert not differing(dtypes, rank, mesh=mesh)


# Since torch 2.15 nothing is cast there: a gradient shows at once, as with float32 alone.
before_2_15 = pytest.mark.skipif(SINCE_TORCH_2_15, reason="gradients are reduced in float32")
ROWS_OF_ONE_RANK = (
    pytest.param((FP32, BF16, None), marks=before_2_15),
    (FP32, BF16, BF16),
    (BF16, None, FP32),
)


@pytest.mark.parametrize("dtypes", ROWS_OF_ONE_RANK, ids=str)
@on_ranks(1, whole=True)
def test_one_rank_rounds_as_several_do(rank: int, dtypes: Dtypes) -> None:
    assert not differing([dtypes] * 3, rank)


OVERRIDES = any(one.name == "param_dtype_override_fn" for one in fields(MixedPrecisionPolicy))
needs_overrides = pytest.mark.skipif(not OVERRIDES, reason="needs torch 2.15")


def mixed(shard: Any, reduces: torch.dtype | None, override: Any) -> Any:
    torch.manual_seed(3)
    made = nn.Sequential(Mixed(), Mixed())
    policy = MixedPrecisionPolicy(BF16, reduces, param_dtype_override_fn=override)  # type: ignore[call-arg]
    for part in (*made, made):
        shard(part, mp_policy=policy)
    return made


def vectors_in_float32(param: torch.Tensor) -> torch.dtype | None:
    return FP32 if param.ndim == 1 else None


@needs_overrides
@pytest.mark.parametrize("reduces", (None, BF16, FP32), ids=str)
@on_ranks(2)
def test_parameters_of_a_unit_compute_in_dtypes_of_their_own(
    rank: int, reduces: torch.dtype | None
) -> None:
    """While gradients are reduced in each backward, and while they are added up before."""
    found = []
    for shard in (theirs, ours):
        made = mixed(shard, reduces, vectors_in_float32)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        numbers = []
        for microbatch in range(6):
            made.set_requires_gradient_sync(microbatch in (0, 2, 5))
            loss = made(torch.randn(4, WIDTH, generator=generator)).square().mean()
            loss.backward()
            numbers.append(loss.item())
            if microbatch in (0, 2, 5):
                optimizer.step()
                optimizer.zero_grad()
        found.append((numbers, full_all(dict(made.named_parameters()))))
    (expected, theirs_at_end), (numbers, weights) = found
    assert numbers == expected
    for name, value in theirs_at_end.items():
        assert torch.equal(weights[name], value), name


@needs_overrides
@on_ranks(2)
def test_a_dtype_of_its_own_is_that_of_the_parameter_or_of_the_policy(rank: int) -> None:
    with pytest.raises(ValueError, match=r"linear.weight .* returned torch.float16\. Return None"):
        mixed(ours, None, lambda param: FP16)


@pytest.mark.skipif(not SINCE_TORCH_2_15, reason="torch's function does not read it")
@on_ranks(2)
def test_another_dtype_of_gradients_is_refused(rank: int) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(BF16)
    layer.weight.grad_dtype = FP32  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"weight .*grad_dtype=torch.float32 is not supported"):
        ours(layer)
