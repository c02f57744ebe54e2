"""CUDA graphs of layers on the host: what is captured is noted, operator by operator, and replayed
on the same memory (`tests/engine/fake_graphs.py`). Trained beside the same model without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.megatron.layer_graphs import LayerCaptures
from tests.distributed.checks import check_same_bits
from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    full_weights,
    train_step,
)
from tests.engine.fake_graphs import FakeGraphs

CASE = Case(num_layers=3, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, bf16=True)
CPU = torch.device("cpu")
SLOTS = {"fsdp_double_buffer": True}


class Asked:
    """A model config that asks for graphs of layers."""

    cuda_graph_impl, cuda_graph_warmup_steps = "local", 1

    def __init__(self, *parts: str) -> None:
        self.cuda_graph_scope = list(parts)


def graphed(trainer: Trainer, *parts: str) -> FakeGraphs:
    """Puts graphs into a trainer that has none, as the wrapper does where it is asked for them."""
    fake, wrapper = FakeGraphs(), trainer.wrapper
    wrapper._layers = LayerCaptures(wrapper.engine, wrapper.module, Asked(*parts), fake)
    return fake


def numbers(trainer: Trainer, steps: int, rank: int = 0) -> tuple[list[Any], Any]:
    found: list[Any] = []
    for step in range(steps):
        found.append(train_step(trainer, batches(trainer.case, step, rank, CPU)))
        with torch.no_grad():
            data = batches(trainer.case, 90 + step, rank, CPU)
            found.append(forward_backward(trainer, data, forward_only=True))
    return found, full_weights(trainer)


@pytest.mark.parametrize("parts", [(), ("attn",), ("attn", "mlp")])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_replays_train_to_the_bits_of_eager_steps(
    one_rank: torch.device, strategy: str, parts: tuple[str, ...]
) -> None:
    plain = build_trainer(CASE, strategy, CPU, ddp=SLOTS)
    trainer = build_trainer(CASE, strategy, CPU, ddp=SLOTS)
    fake = graphed(trainer, *parts)
    expected, found = numbers(plain, 4), numbers(trainer, 4)
    assert found[0] == expected[0]
    check_same_bits(found[1], expected[1], strategy)
    assert fake.captures == 2 * CASE.num_layers * max(1, len(parts))
    assert len(fake.replays) == 3 * CASE.microbatches * fake.captures
