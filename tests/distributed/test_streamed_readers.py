"""Who reads or writes, in Megatron's loop, what the updates of a step that has returned still write
or read: races between streams, which are pretended, are seen on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter import export_weights, release_memory, return_memory
from megatron_fsdp_adapter.sharding import building
from tests.adapter.test_bridge_weights import Task, standing_in
from tests.distributed.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
    load_weights,
    train_step,
)
from tests.distributed.launch import run_ranks
from tests.engine.recording import RaceError, RecordingRuntime

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.5, bf16=True)
OFFLOAD = {"chunked_optimizer_state_offload": True}


class DoesNotBlock(RecordingRuntime):
    def block(self, event: Any) -> None:
        """The host goes on."""


def _read(values: Any) -> None:
    for value in values:
        getattr(value, "_local_tensor", value).clone()


def _read_state(state: dict[Any, dict[str, Any]]) -> None:
    _read(v for one in state.values() for v in one.values() if isinstance(v, torch.Tensor))


def _released(trainer: Trainer) -> None:
    release_memory(trainer.wrapper, trainer.optimizer)
    return_memory(trainer.wrapper, trainer.optimizer)


def _evaluates_before_the_step(trainer: Trainer) -> None:
    """Between a backward and its step; the evaluation raises, with gathers that nobody uses."""
    forward_backward(trainer, batches(CASE, 8, 0, DEVICE))
    layer = next(one for name, one in trainer.wrapper.named_modules() if name.endswith("layers.0"))
    raises = layer.register_forward_pre_hook(lambda *unused: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward_backward(trainer, batches(CASE, 9, 0, DEVICE), True)
    raises.remove()
    trainer.optimizer.step()


def _by_bridge(trainer: Trainer) -> None:
    """An export with tasks of before, as for every refit of an engine that generates."""
    pairs = trainer.wrapper.engine.pairs
    tasks = [Task(pair.managed.fqns[0], pair.unsharded) for pair in pairs]
    with standing_in() as module:
        made = module.MegatronModelBridge()
        _read(dict(made.stream_weights_megatron_to_hf([trainer.wrapper], None, tasks)).values())


def _load_by_bridge(trainer: Trainer) -> None:
    with standing_in() as module:
        module.MegatronModelBridge().load_weights_hf_to_megatron(
            lambda name, shape: torch.ones(shape), [trainer.wrapper]
        )


READERS: dict[str, tuple[Callable[[Trainer], Any], bool]] = {
    "state dict": (lambda t: _read(t.wrapper.state_dict_for_save_checkpoint().values()), True),
    "optimizer state": (lambda t: _read_state(t.optimizer.optimizer.state_dict()["state"]), True),
    "optimizer checkpoint": (
        lambda t: _read_state(distributed_optimizer(t).sharded_param_state_fsdp_dtensor()["state"]),
        True,
    ),
    "export": (lambda t: _read(dict(export_weights(t.wrapper, dtype=None)).values()), True),
    "export of bf16": (lambda t: _read(dict(export_weights(t.wrapper)).values()), False),
    "bridge, cached tasks": (_by_bridge, True),
    "bridge, load": (_load_by_bridge, True),
    "load": (lambda t: load_weights(t, t.wrapper.test_began), True),
    "release": (_released, False),
    "evaluation": (lambda t: forward_backward(t, batches(CASE, 9, 0, DEVICE), True), False),
    "another step": (lambda t: t.optimizer.step(), False),
    "evaluation before a step": (_evaluates_before_the_step, False),
}
"""What comes after a step, and whether it is a race where the host does not wait."""

DEVICE = torch.device("cpu")


def _races(
    rank: int, world: int, runtime: type[RecordingRuntime], *options: dict[str, Any]
) -> dict[str, str]:
    """Readers that race, with what; the last options are tried with all of them, others with what
    comes before a step."""
    building.make_runtime = lambda device: runtime()  # type: ignore[assignment]
    init_megatron()
    found = {}
    cells = [(name, options[-1]) for name in READERS]
    cells += [("evaluation before a step", ddp) for ddp in options[:-1]]
    for name, ddp in cells:
        trainer = build_trainer(CASE, "optim_grads_params", DEVICE, ddp=ddp)
        trainer.wrapper.test_began = trainer.params()
        try:
            with trainer.wrapper.engine.runtime.watch():
                for number in range(2):
                    train_step(trainer, batches(CASE, number, rank, DEVICE))
                READERS[name][0](trainer)
                train_step(trainer, batches(CASE, 2, rank, DEVICE))
        except RaceError as error:
            found[name if ddp is options[-1] else f"{name} {ddp}"] = str(error)
    return found


@pytest.mark.parametrize("runtime", [RecordingRuntime, DoesNotBlock])
def test_everybody_waits_for_updates_behind_a_step(runtime: type[RecordingRuntime]) -> None:
    (found,) = run_ranks(_races, 1, runtime, {}, OFFLOAD)
    expected = {name for name, (_, races) in READERS.items() if races and runtime is DoesNotBlock}
    assert set(found) == expected, found
    for text in found.values():
        assert "without waiting for store" in text or "without waiting for update" in text
