"""What is done to a wrapped module from outside: conversions, hooks, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_step,
    train_step,
)

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2)
DEVICE = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_rank")


def data() -> list[torch.Tensor]:
    return batches(CASE, 0, 0, DEVICE)


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "to dtype": lambda module: module.to(torch.float16),
    "to meta": lambda module: module.to("meta"),
    "to empty memory": lambda module: module.to_empty(device="cpu"),
    "to_empty": lambda module: module.to_empty(device="meta"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversion_after_wrapping_is_refused(trainer: Trainer, name: str) -> None:
    """Of the wrapper and of every module below: it would detach parameters from their buffers."""
    layer = get_attr_wrapped_model(trainer.wrapper, "decoder").layers[0]
    for module in (trainer.wrapper, trainer.wrapper.module, layer, layer.mlp.linear_fc1):
        with pytest.raises(RuntimeError, match="convert the module before wrapping it"):
            CONVERSIONS[name](module)
    assert train_step(trainer, data())[0] > 0


def test_conversion_that_changes_nothing_passes(trainer: Trainer) -> None:
    for module in (trainer.wrapper, get_attr_wrapped_model(trainer.wrapper, "decoder")):
        assert module.float() is module
        assert module.to("cpu") is module
        assert module.to(torch.float32) is module
        assert module.cpu() is module


def test_hooks_of_the_user_on_the_model_run(trainer: Trainer) -> None:
    """Trap I3: calling `module.forward` would skip them. They see gathered weights."""
    model = get_attr_wrapped_model(trainer.wrapper, "decoder", return_model_obj=True)
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    layer: Any = model.decoder.layers[0]
    layer.register_forward_pre_hook(lambda m, _: seen.append(m.mlp.linear_fc1.weight.sum().item()))
    forward_step(CASE, iter(data()), trainer.wrapper)
    assert seen[0] == "before" and seen[-1] == "after" and isinstance(seen[1], float)


def test_compiling_the_wrapper_is_refused(trainer: Trainer) -> None:
    """An error raised while torch traces would make it run the module as it is, in silence."""
    compiled = torch.compile(trainer.wrapper, backend="eager")
    with pytest.raises(RuntimeError, match=r"torch\.compile of a wrapped model"):
        forward_step(CASE, iter(data()), compiled)


def _computes(model: Any) -> None:
    """The embedding becomes a subclass, whose backward reads the table."""

    class Own(type(model.embedding)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            table = nn.functional.normalize(self.word_embeddings.weight)
            hidden: torch.Tensor = super().forward(*args, **kwargs)
            return hidden + 0.1 * (hidden @ table.t()) @ table

    model.embedding.__class__ = Own


def test_an_embedding_that_computes_has_its_weights_in_backward() -> None:
    """In slots, which another unit would be in by then."""
    change: Any
    for change, reads in ((lambda model: None, False), (_computes, True)):
        slots = {"fsdp_double_buffer": True}
        trainer = build_trainer(CASE, "optim_grads_params", DEVICE, change, slots)
        [unit] = [one for one in trainer.wrapper.engine.units if "embedding" in one.name]
        assert unit.backward_reads_weights is reads
    plain = build_trainer(CASE, None, DEVICE, _computes)
    for step in range(3):
        numbers = [train_step(one, batches(CASE, step, 0, DEVICE)) for one in (trainer, plain)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
