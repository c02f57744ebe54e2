"""Fixed and registered communication buffers train like buffers that come and go, bit for bit, do
not overlap what is in use, and take no more memory than their plan."""

from __future__ import annotations

import gc
from typing import Any

import torch

from tests.lib.gpt.checks import check_run_bits, free_run
from tests.lib.gpt.gpt import Case, batches, build_trainer, forward_backward, init_megatron
from tests.lib.gpu.device_memory import run_steps, stays_flat
from tests.lib.gpu.gpu_ranks import Check, Outcomes, expecting
from tests.lib.gpu.runs import COPY_ENGINES, SLOTS, ZERO_3

CHECKS = ("core/engine/buffer.py", "core/comm/registered.py")

WIDE = Case(
    num_layers=5,
    hidden=256,
    heads=4,
    ffn=640,
    vocab=1000,
    seq=128,
    batch=2,
    swiglu=True,
    bf16=True,
    microbatches=2,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "double buffer": SLOTS,
    "registered": {"nccl_ub": True},
    "registered for a rank alone": {"nccl_ub": True, "disable_symmetric_registration": True},
    "registered later": {"nccl_ub": True, "fsdp_manual_registration": True},
    "copy engines": {"fsdp_copy_engine_all_gather": True},
    "copy engines, all registered": {"fsdp_copy_engine_all_gather": True, "nccl_ub": True},
    "gradients by copy engines": {"fsdp_copy_engine_reduce_scatter": True},
    "both by copy engines": COPY_ENGINES,
    "bf16 gradients by copy engines": {
        "fsdp_copy_engine_reduce_scatter": True,
        "megatron_fsdp_grad_comm_dtype": torch.bfloat16,
        "reduce_scatter_with_fp32_accumulation": True,
    },
}


def same_bits(rank: int, world: int, name: str) -> None:
    """Three steps, two microbatches each, an evaluation between, on 5 layers in two slots."""
    device = init_megatron()
    runs = []
    # Two ranks' sums are the same in any order; the dtype on the wire is another matter.
    wire = ("megatron_fsdp_grad_comm_dtype", "reduce_scatter_with_fp32_accumulation")
    same = {option: value for option, value in OPTIONS[name].items() if option in wire}
    for options in (same, OPTIONS[name]):
        trainer = build_trainer(WIDE, ZERO_3, device, ddp=options)
        first = free_run(trainer, rank, 1, device)
        trainer.wrapper.param_and_grad_buffer.manual_buffer_registration()
        with torch.no_grad():
            forward_backward(trainer, batches(WIDE, 9, rank, device), forward_only=True)
        runs.append(first + free_run(trainer, rank, 2, device))
        del trainer
        gc.collect()
    check_run_bits(runs[0], runs[1], name)


def two_wrappers(rank: int, world: int) -> None:
    """Each has slots and registrations of its own; one goes away before the other."""
    device = init_megatron()
    options = OPTIONS["copy engines, all registered"]
    one, two = (build_trainer(WIDE, ZERO_3, device, ddp=options) for _ in range(2))
    run_steps(one, rank, 2, device)
    run_steps(two, rank, 1, device)
    del one
    gc.collect()
    run_steps(two, rank, 2, device)


def fixed_memory(rank: int, world: int, name: str) -> str:
    """No buffer of a unit is allocated after construction, and memory stays flat over 100 steps."""
    trainer = build_trainer(WIDE, ZERO_3, init_megatron(), ddp=OPTIONS[name])
    units = trainer.wrapper.engine.units
    places = set()
    for unit in units[1:-2]:
        for group in unit.groups:
            places.add((unit.weight_slot, group.weights.unsharded[0].tensor.data_ptr()))
    assert len(places) == 2, f"5 layers should lie in two slots, and lie in {places}"
    return stays_flat(trainer, rank, 100)


def registers_once(rank: int, world: int) -> str:
    """Each pool with each communicator: at construction, or on request; never in training."""
    device = init_megatron()
    for manual in (False, True):
        options = {"nccl_ub": True, "fsdp_manual_registration": manual}
        trainer = build_trainer(WIDE, ZERO_3, device, ddp=options)
        memory = trainer.wrapper.param_and_grad_buffer._slots
        every = len(memory._pools) * len(memory._groups)
        assert every > 0
        assert len(memory._registered) == (0 if manual else every)
        run_steps(trainer, rank, 2, device)
        assert len(memory._registered) == (0 if manual else every)
        for _ in range(2):
            trainer.wrapper.param_and_grad_buffer.manual_buffer_registration()
            assert len(memory._registered) == every
        run_steps(trainer, rank, 2, device)
        assert len({(id(ref()), id(pool)) for ref, pool in memory._registered}) == every
        del trainer, memory
        gc.collect()
    return f"{every} registrations"


DEVICE_CHECKS = {
    **{name: Check(same_bits, (name,)) for name in OPTIONS},
    "two wrappers": Check(two_wrappers),
    "registers once": Check(registers_once),
    **{f"fixed, {n}": Check(fixed_memory, (n,)) for n in ("double buffer", "copy engines")},
}
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=150.0)

test_on_two_gpus = expecting(OUTCOMES)
