"""Activations on the host, on two GPUs with Transformer Engine's layers: losses and weights are bit
for bit those of a run without, no buffer of the wrapper is copied, and memory of a forward falls
with the layers that are offloaded.

    pytest tests/gpu/test_gpu_activation_offload.py -rA    # prints memory with 0, half, all layers
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.autograd.graph import save_on_cpu

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.distributed import gpt
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.distributed.test_activation_offload import (
    CONTIGUOUS,
    Run,
    config_with,
    same,
    storages,
)
from tests.gpu.gpu_ranks import Check, Outcomes

CASE = Case(
    num_layers=4, hidden=512, heads=8, ffn=1024, vocab=512, seq=1024, batch=2, bf16=True,
    swiglu=True, bias=False, microbatches=2,
)  # fmt: skip
WIDE = Case(
    num_layers=6, hidden=4096, heads=32, ffn=14336, vocab=8192, seq=4096, batch=1, bf16=True,
    swiglu=True, bias=False, microbatches=1,
)  # fmt: skip
STEPS = 3
FINE_GRAINED = {
    "fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1024,
    "offload_modules": list(CONTIGUOUS),
}  # fmt: skip


def layers_offloaded(number: int) -> dict[str, Any]:
    return {"cpu_offloading": number > 0, "cpu_offloading_num_layers": number}


@contextmanager
def no_buffer_is_copied(trainer: Trainer) -> Iterator[list[tuple[int, ...]]]:
    """Every copy of torch's from the device to the host is looked at; the list has the shapes of
    what lay in a buffer of the wrapper."""
    owned, found, copy = storages(trainer.wrapper), [], torch.Tensor.copy_

    def seen(target: torch.Tensor, source: torch.Tensor, *args: Any, **options: Any) -> Any:
        leaves = source.is_cuda and not target.is_cuda and type(source) is torch.Tensor
        if leaves and source.untyped_storage()._cdata in owned:
            found.append(tuple(source.shape))
        return copy(target, source, *args, **options)

    with mock.patch.object(torch.Tensor, "copy_", seen):
        yield found


def run(
    case: Case, strategy: str, rank: int, options: dict[str, Any], on_cpu: bool = False,
    weights: bool = True,
) -> Run:
    """Losses, norms and, unless they are many, weights of a few steps."""
    device = init_megatron()
    patches.install(FUSED_WGRAD)
    with ExitStack() as stack:
        spec = get_gpt_layer_with_transformer_engine_spec
        stack.enter_context(mock.patch.object(gpt, "get_gpt_layer_local_spec", spec))
        stack.enter_context(config_with(**options))
        trainer = build_trainer(case, strategy, device)
        found = stack.enter_context(no_buffer_is_copied(trainer))
        if on_cpu:
            stack.enter_context(save_on_cpu(pin_memory=True))
        losses: list[Any] = []
        for step in range(STEPS):
            losses += train_step(trainer, batches(case, step, rank, device))
    assert not found, found
    return losses, trainer.params() if weights else {}


def changes_no_bit(rank: int, world: int, strategy: str, fused: bool) -> str:
    case = CASE.but(fused=fused)
    expected = run(case, strategy, rank, {})
    for number in (2, 3):
        same(run(case, strategy, rank, layers_offloaded(number)), expected, f"{number} layers")
    same(run(case, strategy, rank, {}, on_cpu=True), expected, "save_on_cpu")
    same(run(case, strategy, rank, FINE_GRAINED), expected, "inside of layers")
    return str(expected[0])


def wide_layers_change_no_bit(rank: int, world: int) -> str:
    expected = run(WIDE, "optim_grads_params", rank, {}, weights=False)[0]
    for number in (3, 5):
        options = layers_offloaded(number)
        found = run(WIDE, "optim_grads_params", rank, options, weights=False)[0]
        assert found == expected, (number, found, expected)
    return str(expected)


def memory_falls(rank: int, world: int) -> str:
    """MiB that are allocated when the last layer's forward has returned, with 0, half and all
    layers but the last. What a layer saves is some 500 MiB, of which at least a half has to go. The
    peak of a step says less: while backward runs, gradients grow as activations go."""
    device, held = init_megatron(), {}
    for number in (0, 3, 5):
        with (
            mock.patch.object(
                gpt, "get_gpt_layer_local_spec", get_gpt_layer_with_transformer_engine_spec
            ),
            config_with(**layers_offloaded(number)),
        ):
            trainer = build_trainer(WIDE, "optim_grads_params", device)
        for step in range(2):
            train_step(trainer, batches(WIDE, step, rank, device))
        decoder = next(m for m in trainer.wrapper.modules() if isinstance(m, TransformerBlock))
        found: list[float] = []
        handle = decoder.register_forward_hook(
            lambda *_, found=found: found.append(torch.cuda.memory_allocated() / 2**20)
        )
        forward_backward(trainer, batches(WIDE, 2, rank, device))
        handle.remove()
        (held[number],) = found
        del trainer, decoder, handle
        gc.collect()
        torch.cuda.empty_cache()
    assert held[3] < held[0] - 750 and held[5] < held[3] - 500, held
    return str({number: round(count) for number, count in held.items()})


os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # the ranks inherit it
HAS_TE = importlib.util.find_spec("transformer_engine") is not None
CHECKS = {
    **{
        f"{strategy}, fused {fused}": Check(changes_no_bit, (strategy, fused))
        for strategy in STRATEGIES
        for fused in ((False, True) if strategy == "optim_grads_params" else (True,))
    },
    "hidden 4096": Check(wide_layers_change_no_bit),
    "memory": Check(memory_falls),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=420.0)


@pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("name", CHECKS)
def test_activations_on_the_host(name: str) -> None:
    OUTCOMES.expect(name)
