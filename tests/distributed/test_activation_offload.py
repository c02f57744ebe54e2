"""Activations that are kept on the host between forward and backward: losses and weights are those
of a run without, bit for bit, and none of the wrapper's buffers is among what is copied.

Core's own offload inside of layers, with a stand-in for CUDA's streams, on which nothing runs late.
On GPUs, with Transformer Engine's around layers too: tests/gpu/test_gpu_offload.py. Hooks of a
user's: tests/engine/test_engine_saved.py, and cells of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers

from tests.distributed import gpt
from tests.distributed.checks import check_same_bits
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.distributed.shared_ranks import on_ranks
from tests.engine.engine_cases import buffers_of
from tests.host_offload import Copied, core_offloads_on_the_host

CASE = Case(num_layers=4, hidden=24, ffn=40, seq=8)
CONTIGUOUS = ("attn_norm", "qkv_linear", "mlp_norm")
MODULES = (*CONTIGUOUS, "core_attn", "attn_proj")
"""The last two save transposed tensors, which core gives back contiguous: products of those are
rounded in another order."""
STEPS = 3

Run = tuple[list[float], dict[str, torch.Tensor]]


def storages(*wrappers: Any) -> set[int]:
    """Of all buffers of the wrappers' engines."""
    return {
        flat.untyped_storage()._cdata
        for wrapper in wrappers
        for _, flat in buffers_of(wrapper.engine)
    }


def same(found: Run, expected: Run, label: str) -> None:
    assert found[0] == expected[0], f"{label}: {found[0]} != {expected[0]}"
    check_same_bits(found[1], expected[1], label)


def train(
    case: Case,
    strategy: str | None,
    device: torch.device,
    rank: int,
    around: Callable[[Any], AbstractContextManager[None]] = lambda wrapper: nullcontext(),
) -> Run:
    """Losses and weights of a few steps, with an evaluation between; steps run in `around`."""
    trainer = build_trainer(case, strategy, device)
    losses = []
    for step in range(STEPS):
        data = batches(case, step, rank, device)
        with around(trainer.wrapper):
            losses += train_step(trainer, data)
            if step == 1:
                losses.append(forward_backward(trainer, data, forward_only=True))
    return losses, trainer.params()


# Core's offload of parts of layers.


@contextmanager
def config_with(**options: Any) -> Iterator[None]:
    """Models of `gpt` are built with these options of the config."""
    made = gpt.model_config

    def changed(case: Case) -> Any:
        config = made(case)
        for name, value in options.items():
            assert hasattr(config, name), name
            setattr(config, name, value)
        config.__post_init__()
        return config

    with mock.patch.object(gpt, "model_config", changed):
        yield


@contextmanager
def views_are_saved() -> Iterator[None]:
    """Core's linear layers multiply by torch's functions, which save views of weights. Its own
    function saves the parameter, which core and Transformer Engine leave."""

    def product(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **rest: Any
    ) -> torch.Tensor:
        y = input @ weight.t() * weight.view(-1)[:: weight.shape[1]]
        return y if bias is None else y + bias

    name = "linear_with_grad_accumulation_and_async_allreduce"
    with mock.patch.object(layers, name, product):
        yield


NOT_ZERO_3 = [pytest.param(strategy, marks=pytest.mark.full) for strategy in STRATEGIES[:3]]


@pytest.mark.parametrize(
    ("case", "modules"),
    (
        (CASE.but(microbatches=1, bf16=True), CONTIGUOUS),
        (CASE.but(microbatches=3, tied=True), CONTIGUOUS),
        (CASE.but(microbatches=3), MODULES),
    ),
)
@pytest.mark.parametrize("strategy", [STRATEGIES[3], *NOT_ZERO_3])
@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
@on_ranks()
def test_core_offloads_parts_of_layers_and_no_weight(
    rank: int, strategy: str, case: Case, modules: tuple[str, ...]
) -> None:
    """With a stand-in for streams, and tensors of any size taken for large enough."""
    device = init_megatron()
    options = {
        "fine_grained_activation_offloading": True, "offload_modules": list(modules),
        "min_offloaded_tensor_size": 1,
    }  # fmt: skip
    with views_are_saved():
        expected = train(case, strategy, device, rank)
        with core_offloads_on_the_host() as copied, config_with(**options):
            found = train(case, strategy, device, rank, copied.watch(storages))
    assert copied.count and not copied.found, (copied.count, copied.found)
    if modules is CONTIGUOUS:
        same(found, expected, "inside of layers")
    else:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_the_stand_ins_copy_a_weight_that_nobody_keeps_from_them() -> None:
    """Or the test above would show nothing."""
    copied = Copied()
    weight = torch.zeros(4)
    with copied.watch(lambda wrapper: {weight.untyped_storage()._cdata})(None):
        copied.see(weight.view(2, 2))
        copied.see(torch.zeros(2))
    assert copied.count == 2 and copied.found == [(2, 2)]
