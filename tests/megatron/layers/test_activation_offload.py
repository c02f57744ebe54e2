"""Activations that are kept on the host between forward and backward: losses and weights are those
of a run without, bit for bit, and none of the wrapper's buffers is among what is copied.

Core's own offload inside of layers, with a stand-in for CUDA's streams, on which nothing runs late.
On GPUs, with Transformer Engine's around layers too: tests/gpu/test_gpu_offload.py. Hooks of a
user's: tests/core/engine/test_engine_saved.py, and cells of the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers

from tests.lib.gpt.checks import Step
from tests.lib.gpt.gpt import Trainer
from tests.lib.gpt.host_offload import CONTIGUOUS, Copied, core_offloads_on_the_host, storages
from tests.lib.gpt.variants import STRATEGIES, ZERO_3, Variant, compare, marked, train_and_evaluate
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("megatron/layers/activation_offload.py",)

SIZES = {"num_layers": 4, "hidden": 24, "ffn": 40, "seq": 8}
MODULES = (*CONTIGUOUS, "core_attn", "attn_proj")
"""The last two save transposed tensors, which core gives back contiguous: products of those are
rounded in another order."""


def offloading(modules: tuple[str, ...]) -> dict[str, Any]:
    """Fields of the model's config; tensors of any size are taken for large enough."""
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": [*modules],
        "min_offloaded_tensor_size": 1,
    }


COPIED = Copied()


@contextmanager
def views_are_saved() -> Iterator[None]:
    """Core's linear layers multiply by torch's functions, which save views of weights. Its own
    function saves the parameter, which core and Transformer Engine leave."""

    def product(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **rest: Any
    ) -> torch.Tensor:
        y = input @ weight.t() * weight.view(-1)[:: weight.shape[1]]
        if bias is None:
            return y
        return y + bias

    name = "linear_with_grad_accumulation_and_async_allreduce"
    with mock.patch.object(layers, name, product), core_offloads_on_the_host(COPIED):
        yield


def watched(trainer: Trainer, number: int, rank: int) -> Step:
    """A step and an evaluation, in which no buffer is to be copied."""
    COPIED.forbidden = storages(trainer.wrapper)
    return train_and_evaluate(trainer, number, rank)


def no_weight_was_copied(ours: Any, reference: Any, strategy: str) -> None:
    assert COPIED.count, (COPIED.count, COPIED.found)
    assert not COPIED.found, (COPIED.count, COPIED.found)


WHERE = (
    # strategies, ranks, whether only in full runs
    ((ZERO_3,), 2, False),
    (STRATEGIES[:3], 2, True),
    (STRATEGIES, 1, True),
)
WHAT = (
    # name, changes of the case, modules whose activations are offloaded
    ("bf16", {"microbatches": 1, "bf16": True}, CONTIGUOUS),
    ("tied", {"tied": True}, CONTIGUOUS),
    ("all modules", {}, MODULES),
)
ROWS = []
for _strategies, _world, _full in WHERE:
    for _name, _case, _modules in WHAT:
        ROWS.append(
            Variant(
                f"{_name}, {_world} ranks, {' '.join(_strategies)}",
                _strategies,
                _world,
                case={**SIZES, **_case, "fields": offloading(_modules)},
                around=views_are_saved,
                drive=watched,
                expect=no_weight_was_copied,
                full=_full,
                compare="bits" if _modules is CONTIGUOUS else "loosely",
                reference={"strategy": "own", "case": {"fields": {}}},
            )
        )


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_core_offloads_parts_of_layers_and_no_weight(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)
