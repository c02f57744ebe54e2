"""Bytes that a rank holds, counted from the tensors that are alive; the engine is not asked.

`live_bytes` finds every tensor that Python knows, through the garbage collector, looks into
wrapped ones, and counts each storage once, at its size of the moment.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from tests.distributed.gpt import (
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


def live_bytes() -> int:
    """Of all storages of this process, counted once each; the collector does not run before."""
    storages = (tensor.untyped_storage() for tensor in tensors())
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@dataclass
class Baseline:
    """What was alive before wrapping and is not to be counted: everything but the parameters.
    Its storages are kept alive, so that no address is used again."""

    storages: dict[int, Any] = field(default_factory=dict)

    def take(self, model: torch.nn.Module) -> None:
        params = {param.untyped_storage()._cdata for param in model.parameters()}
        gc.collect()
        for tensor in tensors():
            storage = tensor.untyped_storage()
            if storage._cdata not in params:
                self.storages[storage._cdata] = storage

    def held(self) -> dict[int, tuple[int, str]]:
        """(bytes, description) of what is alive now and was not then, by address."""
        gc.collect()
        found = {}
        for tensor in tensors():
            storage = tensor.untyped_storage()
            if storage._cdata not in self.storages and storage.nbytes() > SCALAR_BYTES:
                text = f"{tuple(tensor.shape)} {tensor.dtype}"
                found[storage._cdata] = (storage.nbytes(), text)
        return found

    def live_bytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.held().values())


def _warm(case: Case, device: torch.device, baseline: Baseline, model: torch.nn.Module) -> None:
    """Core makes its caches in the first forward: run one before anything is counted."""
    [tokens, *_] = batches(case, 0, 0, device)
    with torch.no_grad():
        forward_step(case, iter([tokens]), model)
    baseline.take(model)


def measure(
    rank: int,
    world: int,
    case: Case,
    strategy: str,
    ddp: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, int]:
    """Live bytes at the points of two steps. `ddp`: fields of the DDP config."""
    device = init_megatron()
    baseline = Baseline()
    trainer = build_trainer(
        case, strategy, device, lambda model: _warm(case, device, baseline, model), ddp
    )
    points = {"wrapped": baseline.live_bytes()}
    for step in ("first", "second"):
        forward_backward(trainer, batches(case, 0, rank, device))
        points[f"{step}: reduced"] = baseline.live_bytes()
        success, _, _ = trainer.optimizer.step()
        assert success
        trainer.wrapper.stop_communication()
        points[f"{step}: stepped"] = baseline.live_bytes()
        trainer.wrapper.zero_grad_buffer()
        points[f"{step}: zeroed"] = baseline.live_bytes()
        trainer.wrapper.engine.main_weights_changed()  # as a load does: nothing stays gathered
        points[f"{step}: at rest"] = baseline.live_bytes()
    return points
