"""Measures what the tables say, on one's own machine: `plan --measure FILE`.

One process measures a GPU: a layer (`measure_layer.py`), attention, launches. Under torchrun the
processes also measure gathers of the first 2, 4, 8, ... ranks and, on GPUs, what products,
collectives and passes over memory take from each other. Two minutes at most. What is not measured
stays as the table has it, and is named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

from .machine import Contention, Gpu, Machine, Network, to_json
from .measure_layer import load_transformer_engine, measure_parts

REFERENCE_LAUNCH = 4.7
"""Microseconds of one launch from Python, of the reference host: 6.3 were measured on a machine
whose host took 1.15 to 1.45 times as long as that for a step."""

BESIDE = 0.05
"""Seconds that two things run beside each other."""

MOST = 5.0
"""Times as long as alone, at the most: what is above is no slowing but waiting."""


@dataclass(frozen=True)
class Sizes:
    """Of what is run: tokens, hidden and width of products; elements of a pass; bytes of a large
    and a small collective; repetitions."""

    tokens: int = 4096
    hidden: int = 4096
    width: int = 14336
    heads: int = 32
    elements: int = 1 << 28
    large: int = 1 << 29
    small: int = 1 << 16
    times: int = 20


TINY = Sizes(16, 32, 64, 2, 1 << 12, 1 << 12, 1 << 8, 2)


def _device() -> torch.device:
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Of one `run`, after warming up."""
    for _ in range(max(1, times // 4)):
        run()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(times):
        run()
    _wait(device)
    return max((time.perf_counter() - begin) / times, 1e-9)


def measure_gpu(gpu: Gpu, device: torch.device, sizes: Sizes) -> Gpu:
    """`gpu` with what this device reaches."""
    x = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=torch.bfloat16)
    up = torch.randn(sizes.hidden, sizes.width, device=device, dtype=torch.bfloat16)
    down = torch.randn(sizes.width, sizes.hidden, device=device, dtype=torch.bfloat16)
    product = seconds_of(lambda: (x @ up) @ down, device, sizes.times)
    flops = 4.0 * sizes.tokens * sizes.hidden * sizes.width
    size = (1, sizes.heads, sizes.tokens, sizes.hidden // sizes.heads)
    q, k, v = (
        torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )

    def attention() -> None:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)

    attended = seconds_of(attention, device, sizes.times)
    attention_flops = 3.5 * 2 * sizes.tokens * sizes.tokens * sizes.hidden
    one = torch.zeros(sizes.elements, device=device)
    other = torch.zeros_like(one)
    copied = seconds_of(lambda: other.copy_(one), device, sizes.times)
    memory = gpu.memory_gib
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return replace(
        gpu, name=name, memory_gib=memory, product_tflops=flops / product / 1e12,
        attention_tflops=attention_flops / attended / 1e12,
        memory_tbps=8.0 * sizes.elements / copied / 1e12, source="measured by plan --measure",
    )  # fmt: skip


def measure_host(device: torch.device, times: int = 2000) -> float:
    """How many times as long as the reference host this one takes for a launch."""
    one = torch.zeros(1, device=device)
    for _ in range(50):
        one.add_(1.0)
    _wait(device)
    begin = time.perf_counter()
    for _ in range(times):
        one.add_(1.0)
    spent = (time.perf_counter() - begin) / times
    _wait(device)
    return spent * 1e6 / REFERENCE_LAUNCH


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _gather(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    run(output, own, group=group)


def _reduce_scatter(
    output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup
) -> None:
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    run(output, source, group=group)


def _slowest(seconds: float, device: torch.device, group: dist.ProcessGroup) -> float:
    found = torch.tensor([seconds], device=device, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return float(found.item())


def measure_network(network: Network, device: torch.device, sizes: Sizes) -> Network:
    """`network` with gathers of the first 2, 4, 8, ... ranks, inside one domain, and of all of them
    where they are in several. Collective over all ranks."""
    link = dict(network.link_gbps)
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    latency, rail = network.hop_us, network.rail_gbps
    count = 2
    while count <= min(local, world):
        group = dist.new_group(list(range(count)))
        if dist.get_rank() < count:
            large, small = _two_sizes(group, count, device, sizes)
            moved = sizes.large * (count - 1) / count
            link[count] = moved / max(large - small, 0.1 * large) / 1e9
            latency = max(0.1, (small * 1e6 - network.base_us) / max(1, count - 1))
        count *= 2
    if world > local:
        large, _ = _two_sizes(_everyone(), world, device, sizes)
        rail = sizes.large * (1 - local / world) / (local * large) / 1e9
    copies = network.copy_gbps
    known = {n: link[n] * copies[n] / network.link_gbps[n] for n in link if n in copies}
    return replace(
        network, name="measured", domain=local if world > local else network.domain,
        link_gbps=link, copy_gbps=known or copies, rail_gbps=rail, hop_us=min(latency, 20.0),
        source="measured by plan --measure; copy engines in the table's proportion",
    )  # fmt: skip


def _two_sizes(
    group: dist.ProcessGroup, count: int, device: torch.device, sizes: Sizes
) -> tuple[float, float]:
    """Seconds of a large and of a small gather, of the slowest rank."""
    found = []
    for nbytes in (sizes.large, sizes.small):
        own = torch.zeros(nbytes // count, device=device, dtype=torch.uint8)
        output = torch.zeros(nbytes // count * count, device=device, dtype=torch.uint8)
        spent = seconds_of(partial(_gather, output, own, group), device, sizes.times)
        found.append(_slowest(spent, device, group))
    return found[0], found[1]


def slowed_beside(
    one: Callable[[], object], other: Callable[[], object], device: torch.device,
    agree: Callable[[float], float],
) -> tuple[float, float]:
    """How many times as long each of the two takes while the other runs on another stream; of each
    as many as take `BESIDE` seconds alone. agree: makes one number of those of all ranks, which
    have to launch as many. CUDA only."""
    alone = [agree(seconds_of(run, device, 10)) for run in (one, other)]
    counts = [max(2, round(BESIDE / seconds)) for seconds in alone]
    streams = [torch.cuda.Stream(device=device), torch.cuda.Stream(device=device, priority=-1)]
    took = [0.0, 0.0]
    for _ in range(2):  # the first warms up; ranks begin together
        agree(0.0)
        begins = [torch.cuda.Event(enable_timing=True) for _ in streams]
        ends = [torch.cuda.Event(enable_timing=True) for _ in streams]
        _wait(device)
        for number in reversed(range(2)):
            with torch.cuda.stream(streams[number]):
                begins[number].record()
        left = list(counts)
        while any(left):  # in turn, so that neither stream waits for the host
            for number, run in enumerate((one, other)):
                if left[number] and left[number] * counts[1 - number] >= (
                    left[1 - number] * counts[number]
                ):
                    with torch.cuda.stream(streams[number]):
                        run()
                    left[number] -= 1
        for number in range(2):
            with torch.cuda.stream(streams[number]):
                ends[number].record()
        _wait(device)
        took = [begins[i].elapsed_time(ends[i]) / 1e3 for i in range(2)]
    return factors([n * seconds for n, seconds in zip(counts, alone, strict=True)], took)


def factors(alone: Sequence[float], beside: Sequence[float]) -> tuple[float, float]:
    """Of what takes `alone` and, begun together, `beside`: until the first has ended both were
    slowed, the rest of the other ran alone."""
    shared = min(beside)
    found = []
    for whole, took in zip(alone, beside, strict=True):
        done = whole - (took - shared)
        found.append(min(MOST, max(1.0, shared / max(done, shared / MOST))))
    return found[0], found[1]


def products_of_layer(device: torch.device, sizes: Sizes) -> Callable[[], None]:
    """Runs those of a layer: outputs, and gradients of inputs and of weights."""
    hidden, width = sizes.hidden, sizes.width
    shapes = ((hidden, 3 * hidden // 2), (hidden, hidden), (hidden, 2 * width), (width, hidden))
    parts = []
    for inputs, outputs in shapes:
        weight, value, grad = (
            torch.randn(size, device=device, dtype=torch.bfloat16)
            for size in ((outputs, inputs), (sizes.tokens, inputs), (sizes.tokens, outputs))
        )
        parts.append((weight, value, grad))

    def run() -> None:
        for weight, value, _ in parts:
            value @ weight.T
        for weight, value, grad in reversed(parts):
            grad @ weight
            grad.T @ value

    return run


def measure_contention(known: Contention, device: torch.device, sizes: Sizes) -> Contention:
    """What products, collectives of all ranks and passes over memory take from each other. Products
    are those of a layer, and a pass the cast of one: kernels of other sizes leave each other other
    parts of the device. CUDA only; collective."""
    world, group = dist.get_world_size(), _everyone()
    product = products_of_layer(device, sizes)
    own = torch.zeros(sizes.large // world, device=device, dtype=torch.uint8)
    output = torch.zeros(sizes.large // world * world, device=device, dtype=torch.uint8)
    main = torch.zeros(sizes.elements, device=device)
    cast = torch.zeros_like(main, dtype=torch.bfloat16)
    grads = torch.zeros(sizes.large // 4 // world * world, device=device)
    shard = torch.zeros(grads.numel() // world, device=device)

    def agree(own_value: float) -> float:
        return _slowest(own_value, device, group)

    def slowest(
        one: Callable[[], object], other: Callable[[], object]
    ) -> tuple[float, float]:
        first, second = slowed_beside(one, other, device, agree)
        return agree(first), agree(second)

    def passes() -> object:
        return cast.copy_(main)

    beside_gather, gather = slowest(product, lambda: _gather(output, own, group))
    beside_reduce, reduce = slowest(product, lambda: _reduce_scatter(shard, grads, group))
    beside_memory, memory = slowest(product, passes)
    memory_beside, _ = slowest(passes, lambda: _gather(output, own, group))
    return replace(
        known, product_beside_nccl=(beside_gather + beside_reduce) / 2,
        product_beside_memory=beside_memory, gather_beside_product=gather,
        reduce_beside_product=reduce, memory_beside_product=memory,
        memory_beside_nccl=memory_beside,
    )  # fmt: skip


def measure(path: str, known: Machine, small: bool = False) -> str:
    """Measures this machine and writes `path`, on the first rank; what is not measured is that of
    `known`. Returns what to print. ValueError where there is neither a GPU nor `small`."""
    device, sizes = _device(), TINY if small else Sizes()
    if device.type != "cuda" and not small:
        raise ValueError(
            "--measure: there is no GPU here; run it where there is one, or with --measure-small"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        load_transformer_engine()
    gpu, left = measure_gpu(known.gpu, device, sizes), ["not measured: a layer: there is no GPU"]
    if device.type == "cuda":
        gpu, left = measure_parts(gpu, device, seconds_of)
    found = replace(known, gpu=gpu, host=measure_host(device, 200 if small else 2000))
    rank = 0
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            rank = dist.get_rank()
            found = replace(found, network=measure_network(found.network, device, sizes))
            if device.type == "cuda":
                cost = measure_contention(found.contention, device, sizes)
                found = replace(found, contention=cost)
        finally:
            dist.destroy_process_group()
    if rank == 0:
        Path(path).write_text(to_json(found) + "\n")
    return "\n".join([*_told(found), *left, f"{path}: use it with --machine"])


def _told(found: Machine) -> list[str]:
    gpu, cost = found.gpu, found.contention
    links = ", ".join(f"{n} ranks {gbps:,.0f}" for n, gbps in found.network.link_gbps.items())
    return [
        f"{gpu.name}: products {gpu.product_tflops:,.1f} TFLOP/s, FP8 {gpu.fp8_product_tflops:,.1f}"
        f", of experts {gpu.grouped_tflops:,.1f}, attention {gpu.attention_tflops:,.1f}, iteration "
        f"{gpu.iteration:.2f} x products; memory {gpu.memory_tbps:.2f} TB/s; host memory "
        f"{gpu.to_host_gbps:.1f} and {gpu.from_host_gbps:.1f} GB/s",
        f"launches {found.host:.2f} x the reference host; links in GB/s: {links}",
        f"products take {cost.product_beside_nccl:.2f} x beside collectives, "
        f"{cost.product_beside_memory:.2f} x beside memory passes; beside products gathers "
        f"{cost.gather_beside_product:.2f} x, reductions {cost.reduce_beside_product:.2f} x, "
        f"memory passes {cost.memory_beside_product:.2f} x ({cost.memory_beside_nccl:.2f} x beside "
        "gathers)",
    ]
