"""The optimizer in host memory, on two GPUs: bits, memory on both sides, copies beside each other
and beside the next forward, and how long a page lock takes.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.diagnostics.memory import (
    IN_HOST_MEMORY,
    Precision,
    bytes_between_steps,
    model_bytes,
    most_bytes,
    unit_bytes,
)
from tests.distributed.checks import Step, check_run_bits, free_run
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    init_megatron,
    train_step,
)
from tests.gpu.gpu_ranks import Check, Outcomes
from tests.gpu.test_gpu_memory import SMALL, _forget_grads, _requested, _steps, _warm_libraries

WIDE = Case(
    num_layers=4, hidden=4096, heads=32, ffn=11008, vocab=8192, seq=256, batch=1, microbatches=2,
    bf16=True, swiglu=True, bias=False,
)  # fmt: skip
UNEVEN = Case(num_layers=3, hidden=264, heads=4, ffn=680, vocab=1003, seq=64, bf16=True)
STREAMED = {"chunked_optimizer_state_offload": True}
LEFT = 8 << 20


def same_bits(rank: int, world: int, strategy: str, wide: bool) -> None:
    """Transformer Engine's FusedAdam, one step for all weights and one for each unit."""
    device, case = init_megatron(), WIDE if wide else UNEVEN
    runs = []
    for ddp in ({}, STREAMED):
        trainer = build_trainer(case, strategy, device, ddp=ddp)
        run = _local_run if wide else free_run
        runs.append(run(trainer, rank, 3, device))
        steps = {group.get("step") for group in trainer.optimizer.param_groups}
        assert steps <= {3, None}, steps
        unread = [train_step(trainer, batches(case, 3 + n, rank, device)) for n in range(3)]
        runs[-1] += [Step(loss, norm, {}, {}) for loss, norm in unread]
        runs[-1] += run(trainer, rank, 1, device)
        del trainer
        gc.collect()
    check_run_bits(runs[1], runs[0], strategy)


def _local_run(
    trainer: Trainer, rank: int, steps: int, device: torch.device
) -> list[Step]:
    """With this rank's part of weights alone: whole ones of a wide model take minutes to put
    together."""
    found = []
    for number in range(steps):
        loss, norm = train_step(trainer, batches(trainer.case, number, rank, device))
        trainer.wrapper.stop_communication()  # parameters are shards then
        named = trainer.wrapper.named_parameters()
        own = {name: param._local_tensor.detach().cpu().clone() for name, param in named}
        found.append(Step(loss, norm, {}, own))
    return found


def _formula(trainer: Trainer, rank: int) -> dict[str, int]:
    engine = trainer.wrapper.engine
    every = [
        unit_bytes(
            [group.layout for group in unit.groups], engine.config.strategy,
            Precision(offload=True), rank,
        )
        for unit in engine.units
    ]
    return model_bytes(every[-1], every[:-1])


def memory(rank: int, world: int, strategy: str) -> str:
    """Between steps and at most the device holds what the formula says; host memory is pinned."""
    device = init_megatron()
    _warm_libraries(UNEVEN, rank, device)
    gc.collect()  # of earlier trainers, which go by and by
    before = _requested()
    trainer = build_trainer(WIDE, strategy, device, ddp=STREAMED)
    _steps(trainer, rank, 2, device)
    held = _formula(trainer, rank)
    _forget_grads(trainer)
    trainer.wrapper.stop_communication()  # the last step's updates are over
    trainer.wrapper.engine.gather.release_all()
    torch.cuda.synchronize()
    found, expected = _requested() - before, bytes_between_steps(held)
    # What the last step of an earlier check has left goes with a step of this one.
    assert -LEFT <= found - expected <= SMALL + expected // 1000, (found, expected)
    on_host = 0
    for stage in distributed_optimizer(trainer).optimizer._fsdp_shards._stages:
        for buffer in stage.buffers:
            assert buffer.host.tensor.is_pinned() and not buffer.device_buffer.allocated
            on_host += buffer.host.nbytes
    assert on_host == held[IN_HOST_MEMORY], (on_host, held)
    torch.cuda.reset_peak_memory_stats()
    _steps(trainer, rank, 1, device)
    peak = torch.cuda.max_memory_allocated() - before
    return f"{strategy}: {expected:,} between steps, at most {peak:,} of {most_bytes(held):,} and "\
        f"activations, {on_host:,} on the host"


def copies_beside_compute(rank: int, world: int) -> str:
    """Copies to the device and from it are on two streams, and run at one time."""
    device = init_megatron()
    trainer = build_trainer(WIDE, "optim_grads_params", device, ddp=STREAMED)
    _steps(trainer, rank, 2, device)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _steps(trainer, rank, 1, device)
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"HtoD": [], "DtoH": []}
    for event in profile.events():
        for way in spans:
            if way in event.name and event.time_range.elapsed_us() > 200:
                spans[way].append((event.time_range.start, event.time_range.end))
    both = sum(
        max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans["HtoD"] for b in spans["DtoH"]
    )
    one = sum(end - start for start, end in spans["DtoH"])
    assert one > 0 and both > 0.3 * one, (both, one)
    return f"{both / one:.0%} of the time of copies to the host there are copies to the device"


MANY_TOKENS = WIDE.but(seq=512, batch=64, microbatches=1)
"""A forward about as long as the copies of a step."""

Span = tuple[float, float]


def _union(spans: list[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _shared(one: list[Span], other: list[Span]) -> float:
    """Microseconds in both."""
    pairs = ((a, b) for a in _union(one) for b in _union(other))
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def updates_beside_the_next_forward(rank: int, world: int) -> str:
    """Of several steps that nobody reads the weights of: a part of the copies, which were all in
    the step when that waited for them, runs beside matrix products."""
    device = init_megatron()
    trainer = build_trainer(MANY_TOKENS, "optim_grads_params", device, ddp=STREAMED)
    _steps(trainer, rank, 2, device)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _steps(trainer, rank, 3, device)
        torch.cuda.synchronize()
    copies: list[Span] = []
    products: list[Span] = []
    for event in profile.events():
        span = (event.time_range.start, event.time_range.end)
        if "HtoD" in event.name or "DtoH" in event.name:
            if event.time_range.elapsed_us() > 200:
                copies.append(span)
        elif any(part in event.name.lower() for part in ("gemm", "nvjet", "cutlass")):
            products.append(span)
    assert copies and products, sorted({event.name for event in profile.events()})[:40]
    copied = sum(end - start for start, end in _union(copies))
    multiplied = sum(end - start for start, end in _union(products))
    both = _shared(copies, products)
    report = (
        f"3 steps: copies {copied / 3e3:.0f} ms a step, products {multiplied / 3e3:.0f}, at one "
        f"time {both / 3e3:.0f}: {both / copied:.0%} of the copies"
    )
    assert both > 0.1 * copied, report
    return report


def page_lock(rank: int, world: int) -> str:
    """Seconds for 4 GiB on each rank at a time, as it is and without touching pages first."""
    from megatron_fsdp_adapter.core.runtime import device as runtime

    init_megatron()
    nbytes, found = 4 << 30, {}
    ways = {"touched by threads": runtime.host_pages, "as they come": _plain_pages}
    for name, pages in ways.items():
        torch.cuda.synchronize()
        started = time.perf_counter()
        touched = pages(nbytes)
        found[f"{name}, pages"] = time.perf_counter() - started
        assert not int(torch.cuda.cudart().cudaHostRegister(touched.data_ptr(), nbytes, 1))
        found[f"{name}, with the lock"] = time.perf_counter() - started
        torch.cuda.cudart().cudaHostUnregister(touched.data_ptr())
        del touched
    assert runtime.pinned(1 << 20).is_pinned()
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.items())


def _plain_pages(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


CHECKS: dict[str, Check] = {
    **{f"bits, {s}": Check(same_bits, (s, False)) for s in STRATEGIES},
    "bits, hidden 4096": Check(same_bits, ("optim_grads_params", True)),
    **{f"memory, {s}": Check(memory, (s,)) for s in ("optim", "optim_grads_params")},
    "copies beside compute": Check(copies_beside_compute),
    "updates beside the next forward": Check(updates_beside_the_next_forward),
    "page lock": Check(page_lock),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=300.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)


def test_the_checks_are_named_once() -> None:
    arguments: list[Any] = [(check.function, check.arguments) for check in CHECKS.values()]
    assert len(arguments) == len(set(arguments))
