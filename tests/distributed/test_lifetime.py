"""Deleting the model frees its storage, without the cycle collector (trap L1, D7)."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fsdp_adapter import FullyShardedDataParallel
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    ddp_config,
    forward_backward,
    init_megatron,
    model_config,
    train_step,
)
from tests.distributed.launch import run_ranks


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_bytes() -> int:
    """Bytes of all storages behind any floating tensor of this process, counted once each. torch
    keeps a device mesh's integers for the next mesh."""
    storages = {}
    for held in gc.get_objects():
        if issubclass(type(held), torch.Tensor) and held.dtype.is_floating_point:
            storage = _storage_of(held)
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _storage_of(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        local = getattr(tensor, "_local_tensor", tensor)
        return torch.Tensor.untyped_storage(local)


def engine_storages(wrapper: Any) -> dict[str, StorageWeakRef]:
    """Every buffer of the engine by name."""
    found = {}
    for group in wrapper.engine.groups:
        flats = {kind: getattr(group, kind).tensor for kind in ("main", "bucket", "grad")}
        for number, flat in enumerate(flat for plane in group.planes for flat in plane.buffers):
            flats[f"weights {number}"] = flat
        for kind, flat in flats.items():
            found[f"{group.name} {kind}"] = StorageWeakRef(flat.untyped_storage())
    return found


def still_there(storages: dict[str, StorageWeakRef]) -> list[str]:
    """What is not freed. Collectives that were running keep their tensors until they are done, and
    a little longer: a thread of gloo's lets go of them after it has told that it is done."""
    dist.barrier()
    for _ in range(600):
        left = [name for name, storage in storages.items() if not storage.expired()]
        if not left:
            break
        time.sleep(0.05)
    return left


class Blocks(nn.Module):
    """A model of torch's own modules, none of which is in a reference cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.GELU()) for _ in range(3))
        self.norm = nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def _wrapped_blocks(strategy: str) -> FullyShardedDataParallel:
    case = Case()
    return FullyShardedDataParallel(
        model_config(case), ddp_config(case, strategy), Blocks(), fsdp_unit_modules=[nn.Sequential]
    )


def _forward(wrapper: Any) -> None:
    wrapper(torch.randn(2, 7))


def _backward(wrapper: Any) -> None:
    wrapper(torch.randn(2, 7)).square().mean().backward()


def _steps(wrapper: Any) -> None:
    for _ in range(2):
        wrapper.zero_grad_buffer()
        _backward(wrapper)
        wrapper.finish_grad_sync()
        wrapper.param_and_grad_buffer.copy_main_weights_to_model_weights()
        wrapper.start_param_sync()


STAGES = {"construction": lambda wrapper: None, "forward": _forward, "backward": _backward,
          "steps": _steps}  # fmt: skip


def _delete_blocks(rank: int, world: int) -> None:
    init_megatron()
    for stage, run in STAGES.items():
        for strategy in STRATEGIES:
            with without_collector():
                before = live_bytes()
                wrapper = _wrapped_blocks(strategy)
                run(wrapper)
                storages = engine_storages(wrapper)
                assert live_bytes() > before
                engine = weakref.ref(wrapper.engine)
                del wrapper
                assert engine() is None, (stage, strategy, "the engine is in a cycle")
                left = still_there(storages)
                assert not left, (stage, strategy, left)
                assert live_bytes() == before, (stage, strategy, live_bytes() - before)


@pytest.mark.parametrize("world", (1, 2))
def test_deleting_the_wrapper_frees_all_storage(world: int) -> None:
    """After construction, a forward, a backward and whole steps (with a prefetch on its way); both
    by the engine's buffers and by all storages in the process."""
    run_ranks(_delete_blocks, world)


def _unwire(trainer: Trainer) -> Any:
    """Takes away what Megatron's training script puts into the config: bound methods of wrapper
    and optimizer, which refer back to the config."""
    config = trainer.wrapper.config
    config.no_sync_func = config.grad_scale_func = None
    return config


def _delete_gpt(rank: int, world: int) -> dict[str, list[str]]:
    device = init_megatron()
    left = {}
    for strategy in STRATEGIES:
        with without_collector():
            trainer = build_trainer(Case(), strategy, device)
            train_step(trainer, batches(Case(), 0, rank, device))
            forward_backward(trainer, batches(Case(), 1, rank, device))
            storages = engine_storages(trainer.wrapper)
            _unwire(trainer)
            del trainer
            left[strategy] = still_there(storages)
        gc.collect()
        assert not still_there(storages), strategy
    return left


def test_deleting_a_trained_gpt_and_its_optimizer_frees_the_engines_storage() -> None:
    """The wires of Megatron's training script are cut first; they are cycles of its own. With them
    in place everything is freed by the next collection."""
    for left in run_ranks(_delete_gpt, 2):
        assert not any(left.values()), left
