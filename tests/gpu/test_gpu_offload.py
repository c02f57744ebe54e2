"""The optimizer in host memory, and activations there, on two GPUs: bits, memory on both sides,
copies beside each other and beside the next forward; no buffer of the wrapper is copied.

    pytest tests/gpu/test_gpu_offload.py -rA    # prints memory with 0, half, all layers
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.autograd.graph import save_on_cpu

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from megatron_fsdp_adapter.plan.memory import (
    IN_HOST_MEMORY,
    Precision,
    bytes_between_steps,
    most_bytes,
)
from tests.lib.gpt.checkpoints import loaded, saved
from tests.lib.gpt.checks import Step, check_run_bits, check_same_bits, free_run
from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.lib.gpt.host_offload import CONTIGUOUS, storages
from tests.lib.gpu.device_memory import (
    SMALL,
    forget_grads,
    formula,
    requested_now,
    run_steps,
    warm_libraries,
)
from tests.lib.gpu.gpu_ranks import DETERMINISTIC, Check, Outcomes, expecting
from tests.lib.gpu.runs import ZERO_1, ZERO_3, local_run, te_layers

CHECKS = ("optim/residency.py", "megatron/layers/activation_offload.py", "plan/memory.py")

WIDE = Case(
    num_layers=4,
    hidden=4096,
    heads=32,
    ffn=11008,
    vocab=8192,
    seq=256,
    batch=1,
    microbatches=2,
    bf16=True,
    swiglu=True,
    bias=False,
)
UNEVEN = Case(num_layers=3, hidden=264, heads=4, ffn=680, vocab=1003, seq=64, bf16=True)
STREAMED = {"chunked_optimizer_state_offload": True}
LEFT = 8 << 20


def same_bits(rank: int, world: int, strategy: str, wide: bool) -> None:
    """Transformer Engine's FusedAdam, one step for all weights and one for each unit."""
    device = init_megatron()
    case = WIDE if wide else UNEVEN
    runs = []
    for ddp in ({}, STREAMED):
        trainer = build_trainer(case, strategy, device, ddp=ddp)
        run = local_run if wide else free_run
        runs.append(run(trainer, rank, 3, device))
        steps = {group.get("step") for group in trainer.optimizer.param_groups}
        assert steps <= {3, None}, steps
        unread = [train_step(trainer, batches(case, 3 + n, rank, device)) for n in range(3)]
        runs[-1] += [Step(loss, norm, {}, {}) for loss, norm in unread]
        runs[-1] += run(trainer, rank, 1, device)
        del trainer
        gc.collect()
    check_run_bits(runs[1], runs[0], strategy)


def memory(rank: int, world: int, strategy: str) -> str:
    """Between steps and at most the device holds what the formula says; host memory is pinned."""
    device = init_megatron()
    warm_libraries(UNEVEN, rank, device)
    gc.collect()  # of earlier trainers, which go by and by
    before = requested_now()
    trainer = build_trainer(WIDE, strategy, device, ddp=STREAMED)
    run_steps(trainer, rank, 2, device)
    held = formula(trainer, rank, Precision(offload=True))
    forget_grads(trainer)
    trainer.wrapper.stop_communication()  # the last step's updates are over
    trainer.wrapper.engine.gather.reshard_all()
    torch.cuda.synchronize()
    found = requested_now() - before
    expected = bytes_between_steps(held)
    # What the last step of an earlier check has left goes with a step of this one.
    assert -LEFT <= found - expected <= SMALL + expected // 1000, (found, expected)
    on_host = 0
    for part in distributed_optimizer(trainer).optimizer._fsdp_shards.residency.parts:
        for buffer in part.buffers:
            assert buffer.host.tensor.is_pinned()
            assert not buffer.allocated
            on_host += buffer.host.nbytes
    assert on_host == held[IN_HOST_MEMORY], (on_host, held)
    torch.cuda.reset_peak_memory_stats()
    run_steps(trainer, rank, 1, device)
    peak = torch.cuda.max_memory_allocated() - before
    return (
        f"{strategy}: {expected:,} between steps, at most {peak:,} of {most_bytes(held):,} and "
        f"activations, {on_host:,} on the host"
    )


def saved_and_loaded(rank: int, world: int, strategy: str) -> str:
    """A run goes on from its checkpoint as if it had not been stopped."""
    device = init_megatron()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, device=device)

    def steps(trainer: Trainer, first: int) -> list[Any]:
        return [train_step(trainer, batches(UNEVEN, n, rank, device)) for n in (first, first + 1)]

    trainer = build_trainer(UNEVEN, strategy, device, ddp=STREAMED)
    steps(trainer, 0)
    saved(trainer, folder[0])
    expected = steps(trainer, 2)
    del trainer
    gc.collect()
    resumed = build_trainer(UNEVEN, strategy, device, ddp=STREAMED)
    loaded(resumed, folder[0])
    found = steps(resumed, 2)
    assert found == expected, (found, expected)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    return str(expected)


MANY_TOKENS = WIDE.but(seq=512, batch=64, microbatches=1)
"""A forward about as long as the copies of a step."""

Span = tuple[float, float]


def spans_of(
    trainer: Trainer, rank: int, steps: int, device: torch.device
) -> dict[str, list[Span]]:
    """When long copies to the device and from it, and GEMMs, ran in these steps: start
    and end in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_steps(trainer, rank, steps, device)
        torch.cuda.synchronize()
    found: dict[str, list[Span]] = {"HtoD": [], "DtoH": [], "products": []}
    for event in profile.events():
        way = next((way for way in ("HtoD", "DtoH") if way in event.name), None)
        if way is None and any(one in event.name.lower() for one in ("gemm", "nvjet", "cutlass")):
            way = "products"
        if way is not None and (way == "products" or event.time_range.elapsed_us() > 200):
            found[way].append((event.time_range.start, event.time_range.end))
    assert found["HtoD"] and found["DtoH"], sorted({event.name for event in profile.events()})[:40]
    return found


def _union(spans: list[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _total(spans: list[Span]) -> float:
    return sum(end - start for start, end in _union(spans))


def _shared(one: list[Span], other: list[Span]) -> float:
    """Microseconds in both."""
    pairs = ((a, b) for a in _union(one) for b in _union(other))
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def copies_beside_compute(rank: int, world: int) -> str:
    """Copies to the device and from it are on two streams, and run at one time."""
    device = init_megatron()
    trainer = build_trainer(WIDE, ZERO_3, device, ddp=STREAMED)
    run_steps(trainer, rank, 2, device)
    spans = spans_of(trainer, rank, 1, device)
    both = _shared(spans["HtoD"], spans["DtoH"])
    one = _total(spans["DtoH"])
    assert both > 0.3 * one, (both, one)
    return f"{both / one:.0%} of the time of copies to the host there are copies to the device"


def updates_beside_the_next_forward(rank: int, world: int) -> str:
    """Of several steps whose weights nothing reads: a part of the copies, which were all in the
    step when that waited for them, runs beside GEMMs."""
    device = init_megatron()
    trainer = build_trainer(MANY_TOKENS, ZERO_3, device, ddp=STREAMED)
    run_steps(trainer, rank, 2, device)
    torch.cuda.synchronize()
    spans = spans_of(trainer, rank, 3, device)
    copies = spans["HtoD"] + spans["DtoH"]
    products = spans["products"]
    copied = _total(copies)
    both = _shared(copies, products)
    report = (
        f"3 steps: copies {copied / 3e3:.0f} ms a step, products {_total(products) / 3e3:.0f}, at "
        f"one time {both / 3e3:.0f}: {both / copied:.0%} of the copies"
    )
    assert both > 0.1 * copied, report
    return report


# Activations.

ACTIVATIONS = Case(
    num_layers=4,
    hidden=512,
    heads=8,
    ffn=1024,
    vocab=512,
    seq=1024,
    batch=2,
    bf16=True,
    swiglu=True,
    bias=False,
    microbatches=2,
)
LONG = Case(
    num_layers=6,
    hidden=4096,
    heads=32,
    ffn=14336,
    vocab=8192,
    seq=4096,
    batch=1,
    bf16=True,
    swiglu=True,
    bias=False,
    microbatches=1,
)
FINE_GRAINED = {
    "fine_grained_activation_offloading": True,
    "min_offloaded_tensor_size": 1024,
    "offload_modules": list(CONTIGUOUS),
}


def layers_offloaded(number: int) -> dict[str, Any]:
    return {"cpu_offloading": number > 0, "cpu_offloading_num_layers": number}


@contextmanager
def no_buffer_is_copied(trainer: Trainer) -> Iterator[list[tuple[int, ...]]]:
    """Every copy of torch's from the device to the host is looked at; the list has the shapes of
    what lay in a buffer of the wrapper."""
    owned = storages(trainer.wrapper)
    found = []
    copy = torch.Tensor.copy_

    def seen(target: torch.Tensor, source: torch.Tensor, *args: Any, **options: Any) -> Any:
        leaves = source.is_cuda and not target.is_cuda and type(source) is torch.Tensor
        if leaves and source.untyped_storage()._cdata in owned:
            found.append(tuple(source.shape))
        return copy(target, source, *args, **options)

    with mock.patch.object(torch.Tensor, "copy_", seen):
        yield found


def run(
    case: Case,
    strategy: str,
    rank: int,
    options: dict[str, Any],
    on_cpu: bool = False,
    weights: bool = True,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, norms and, unless they are many, weights of a few steps."""
    device = init_megatron()
    patches.install(FUSED_WGRAD)
    with ExitStack() as stack:
        stack.enter_context(te_layers())
        trainer = build_trainer(case.but(fields=options), strategy, device)
        found = stack.enter_context(no_buffer_is_copied(trainer))
        if on_cpu:
            stack.enter_context(save_on_cpu(pin_memory=True))
        losses: list[Any] = []
        for step in range(3):
            losses += train_step(trainer, batches(case, step, rank, device))
    assert not found, found
    return losses, trainer.params() if weights else {}


def changes_no_bit(rank: int, world: int, strategy: str, fused: bool) -> str:
    case = ACTIVATIONS.but(fused=fused)
    expected, weights = run(case, strategy, rank, {})
    for label, options, on_cpu in (
        ("2 layers", layers_offloaded(2), False),
        ("3 layers", layers_offloaded(3), False),
        ("save_on_cpu", {}, True),
        ("inside of layers", FINE_GRAINED, False),
    ):
        found, mine = run(case, strategy, rank, options, on_cpu)
        assert found == expected, f"{label}: {found} != {expected}"
        check_same_bits(mine, weights, label)
    return str(expected)


def wide_layers_change_no_bit(rank: int, world: int) -> str:
    expected = run(LONG, ZERO_3, rank, {}, weights=False)[0]
    for number in (3, 5):
        options = layers_offloaded(number)
        found = run(LONG, ZERO_3, rank, options, weights=False)[0]
        assert found == expected, (number, found, expected)
    return str(expected)


def memory_of_activations_falls(rank: int, world: int) -> str:
    """MiB that are allocated when the last layer's forward has returned, with 0, half and all
    layers but the last. What a layer saves is some 500 MiB, of which at least a half has to go. The
    peak of a step says less: while backward runs, gradients grow as activations go."""
    device = init_megatron()
    held = {}
    for number in (0, 3, 5):
        with te_layers():
            trainer = build_trainer(LONG.but(fields=layers_offloaded(number)), ZERO_3, device)
        for step in range(2):
            train_step(trainer, batches(LONG, step, rank, device))
        decoder = next(m for m in trainer.wrapper.modules() if isinstance(m, TransformerBlock))
        found: list[float] = []
        handle = decoder.register_forward_hook(
            lambda *_, found=found: found.append(torch.cuda.memory_allocated() / 2**20)
        )
        forward_backward(trainer, batches(LONG, 2, rank, device))
        handle.remove()
        (held[number],) = found
        del trainer, decoder, handle
        gc.collect()
        torch.cuda.empty_cache()
    assert held[3] < held[0] - 750, held
    assert held[5] < held[3] - 500, held
    return str({number: round(count) for number, count in held.items()})


DEVICE_CHECKS: dict[str, Check] = {
    **{f"bits, {s}": Check(same_bits, (s, False)) for s in STRATEGIES},
    "bits, hidden 4096": Check(same_bits, (ZERO_3, True)),
    **{f"memory, {s}": Check(memory, (s,)) for s in (ZERO_1, ZERO_3)},
    **{f"saved, {s}": Check(saved_and_loaded, (s,)) for s in STRATEGIES},
    "copies beside compute": Check(copies_beside_compute),
    "updates beside the next forward": Check(updates_beside_the_next_forward),
}
OF_ACTIVATIONS = {
    **{
        f"activations, {strategy}, fused {fused}": Check(changes_no_bit, (strategy, fused))
        for strategy in STRATEGIES
        for fused in ((False, True) if strategy == ZERO_3 else (True,))
    },
    "activations, hidden 4096": Check(wide_layers_change_no_bit),
    "activations, memory": Check(memory_of_activations_falls),
}
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=300.0, environment=DETERMINISTIC)
ACTIVATION_OUTCOMES = Outcomes(
    OF_ACTIVATIONS, timeout_s=420.0, needs=("te",), environment=DETERMINISTIC
)

test_on_two_gpus = expecting(OUTCOMES)
test_activations_on_the_host = expecting(ACTIVATION_OUTCOMES)
