"""What users do beside the plain loop, on two GPUs: the rows of tests/lib/gpt/changed_models.py;
exports of live weights, and memory that goes away between training and generation, with bytes of
the allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fsdp_adapter import export_shards, export_weights, release_memory, return_memory
from megatron_fsdp_adapter.rollout.release import storages
from tests.lib.gpt import changed_models
from tests.lib.gpt.changed_models import HABITS
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    init_megatron,
    train_step,
)
from tests.lib.gpt.random_cases import fresh_seed
from tests.lib.gpt.variants import check_row
from tests.lib.gpu.gpu_ranks import Check, Outcomes, expecting
from tests.lib.gpu.runs import SLOTS, ZERO_3

CHECKS = ("megatron/wrapper/units.py", "rollout/export.py", "rollout/release.py")

SMALL_MODEL = Case(num_layers=4, hidden=512, heads=8, ffn=2048, vocab=8192, seq=512, bf16=True)
BESIDE = 64 << 20
"""Bytes that are not the wrapper's: workspaces of cuBLAS, rotary frequencies, communicators."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "slots": SLOTS,
    "registered": {"nccl_ub": True},
    "copy engines": {"fsdp_copy_engine_all_gather": True},
}


def _trained(case: Case, strategy: str, options: str = "plain") -> tuple[Trainer, torch.device]:
    device = init_megatron()
    trainer = build_trainer(case, strategy, device, ddp=OPTIONS[options])
    for step in range(2):
        train_step(trainer, batches(case, step, torch.distributed.get_rank(), device))
    return trainer, device


def _unit_bytes(trainer: Trainer, itemsize: int = 2) -> int:
    units = trainer.wrapper.engine.units
    return itemsize * max(sum(g.layout.total_numel for g in unit.groups) for unit in units)


def exported(rank: int, world: int, strategy: str, options: str) -> str:
    """Every tensor is the whole main weight, rounded; no more than three units are there."""
    trainer, _ = _trained(SMALL_MODEL, strategy, options)
    weights = {name.removeprefix("module."): value for name, value in trainer.params().items()}
    for _ in range(2):
        found = 0
        for name, tensor in export_weights(trainer.wrapper):
            assert torch.equal(tensor, weights[name].to(tensor)), (strategy, name)
            found += 1
        assert found == len(weights)
        train_step(trainer, batches(SMALL_MODEL, 2, rank, tensor.device))
        weights = {name.removeprefix("module."): v for name, v in trainer.params().items()}
    del tensor
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _name, tensor in export_weights(trainer.wrapper):
        del tensor
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 2 * _unit_bytes(trainer) + (8 << 20), (peak, _unit_bytes(trainer))
    shards = sum(shard.tensor.numel() for shard in export_shards(trainer.wrapper))
    assert shards >= sum(value.numel() for value in weights.values()) // world // 2
    return f"{found} tensors, {peak} bytes at most, units of {_unit_bytes(trainer)}"


def released(rank: int, world: int, strategy: str, options: str) -> str:
    """What goes away is gone from the device, and what returns is what it was."""
    trainer, device = _trained(SMALL_MODEL, strategy, options)
    model = trainer.wrapper
    optimizer = trainer.optimizer
    before = trainer.params()
    moments = [state.clone() for state in _states(trainer)]
    torch.cuda.synchronize()
    slots = sum(s.nbytes for s in _registered(trainer))
    bytes_of = release_memory(model, optimizer)
    left = torch.cuda.memory_allocated() - sum(m.nbytes for m in moments)
    left -= sum(value.nbytes for value in before.values()) + slots
    assert left <= BESIDE, f"{left} bytes are left: {bytes_of}"
    with pytest.raises(RuntimeError, match="return_memory"):
        optimizer.step()
    return_memory(model, optimizer)
    after = trainer.params()
    for name, value in before.items():
        assert torch.equal(value, after[name])
    for one, other in zip(_states(trainer), moments, strict=True):
        assert torch.equal(one, other)
    loss, norm = train_step(trainer, batches(SMALL_MODEL, 2, rank, device))
    assert 0 < norm < float("inf"), (loss, norm)
    return str(bytes_of)


def _states(trainer: Trainer) -> list[torch.Tensor]:
    optimizers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    return [t for one in optimizers for t in one.optimizer._fsdp_shards.state_storages()]


def _registered(trainer: Trainer) -> list[torch.Tensor]:
    """Slots that stay: registered with NCCL."""
    engine = trainer.wrapper.engine
    slots = [group.weights.slot for group in engine.groups]
    slots += [grads.slot for grads in engine.grads]
    found = {id(slot.memory): slot.memory for slot in slots if slot.memory is not None}
    if storages(engine)["slots"]:
        return []
    return list(found.values())


DEVICE_CHECKS = {
    **{
        row.name: Check(check_row, (changed_models.__name__, "HABITS", row.name, fresh_seed()))
        for row in HABITS
    },
    **{f"export, {name}": Check(exported, (name, "plain")) for name in STRATEGIES},
    **{f"release, {name}": Check(released, (name, "plain")) for name in STRATEGIES},
    **{
        f"{check.__name__}, {options}": Check(check, (ZERO_3, options))
        for options in OPTIONS
        if options != "plain"
        for check in (exported, released)
    },
}
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=600.0)

test_on_two_gpus = expecting(OUTCOMES)
