"""Bytes that a rank holds, counted from the tensors that are alive; the engine is not asked.

`live_bytes` finds every tensor that Python knows, through the garbage collector, looks into
wrapped ones, and counts each storage once, at its size of the moment.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from tests.lib.gpt.gpt import (
    Case,
    batches,
    build_trainer,
    forward_backward,
    forward_step,
    init_megatron,
)

SCALAR_BYTES = 8
"""Storages of this size or less are not counted: step counts and flags of the optimizer."""


def tensors() -> Iterator[torch.Tensor]:
    """Every floating-point tensor that is alive; of a wrapped one, what it wraps. Integers are
    rank lists of device meshes, tokens and states of random generators."""
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                local = getattr(thing, "_local_tensor", thing)
                if local.is_floating_point() and not local.is_meta:
                    yield local


def storages() -> dict[int, Any]:
    """Of all that is alive, by address; the collector does not run before."""
    found = (tensor.untyped_storage() for tensor in tensors())
    return {storage._cdata: storage for storage in found}


def live_bytes() -> int:
    return sum(storage.nbytes() for storage in storages().values())


def beside(model: torch.nn.Module) -> dict[int, Any]:
    """The storages of all that is alive but the model's parameters. They are kept alive, so that no
    address is used again."""
    params = {param.untyped_storage()._cdata for param in model.parameters()}
    gc.collect()
    return {key: value for key, value in storages().items() if key not in params}


def bytes_beyond(known: Mapping[int, Any]) -> int:
    """Of what is alive now and not in `known`."""
    gc.collect()
    sizes = [one.nbytes() for key, one in storages().items() if key not in known]
    return sum(size for size in sizes if size > SCALAR_BYTES)


def measure(
    rank: int,
    world: int,
    case: Case,
    strategy: str,
    ddp: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, int]:
    """Live bytes at the points of two steps. `ddp`: fields of the DDP config."""
    device = init_megatron()
    known: dict[int, Any] = {}

    def warm(model: torch.nn.Module) -> None:
        """Core makes its caches in the first forward: run one before anything is counted."""
        [tokens, *_] = batches(case, 0, 0, device)
        with torch.no_grad():
            forward_step(case, iter([tokens]), model)
        known.update(beside(model))

    trainer = build_trainer(case, strategy, device, warm, ddp)
    points = {"wrapped": bytes_beyond(known)}
    for step in ("first", "second"):
        forward_backward(trainer, batches(case, 0, rank, device))
        points[f"{step}: reduced"] = bytes_beyond(known)
        success, _, _ = trainer.optimizer.step()
        assert success
        trainer.wrapper.stop_communication()
        points[f"{step}: stepped"] = bytes_beyond(known)
        trainer.wrapper.zero_grad_buffer()
        points[f"{step}: zeroed"] = bytes_beyond(known)
        trainer.wrapper.engine.main_weights_changed()  # as a load does: nothing stays gathered
        points[f"{step}: at rest"] = bytes_beyond(known)
    return points
