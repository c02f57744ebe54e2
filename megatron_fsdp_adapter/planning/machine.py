"""What a machine takes for things: GPUs, their network, the host, and what they cost each other.

The tables say where each number is from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .program import Kind


@dataclass(frozen=True)
class Gpu:
    """A device, alone.

    Attributes:
        memory_gib: of the device, as nvidia-smi says. reserved_gib: of it, what contexts, NCCL and
            fragments of the allocator take.
        peak_tflops: bf16, dense, as the vendor says: MFU is in parts of it.
        product_tflops: what large bf16 matrix products reach. fp8_product_tflops: FP8 ones with a
            scale a tensor; fp8_in_blocks: of those, in parts, with scales of blocks.
        attention_tflops: causal attention, forward and backward together, counting half of the
            square.
        memory_tbps: what passes over memory reach, bytes read and written. kernel_us: from one
            kernel to the next on a stream.
        sustained: how much slower products are where they are all that runs, for the limit of
            power; busy: from which part of the time on, linearly up to all of it.
        source: where the numbers are from.
    """

    name: str
    memory_gib: float
    peak_tflops: float
    product_tflops: float
    fp8_product_tflops: float
    grouped_tflops: float
    attention_tflops: float
    memory_tbps: float
    reserved_gib: float = 6.0
    kernel_us: float = 1.96
    sustained: float = 1.0
    busy: float = 0.75
    fp8_in_blocks: float = 0.9
    source: str = ""


@dataclass(frozen=True)
class Network:
    """Two levels: an NVLink domain, and rail-optimized links between domains, one a GPU.

    Attributes:
        domain: GPUs of one NVLink domain. link_gbps: GB/s that a GPU's ring reaches inside, by the
            number of ranks, the next larger row counts; copy_gbps: the same by copy engines.
        rail_gbps: GB/s of one GPU's link to other domains, as reached.
        hop_us, rail_hop_us: latency of one step inside and between domains; base_us: of any
            collective.
    """

    name: str
    domain: int
    link_gbps: Mapping[int, float]
    copy_gbps: Mapping[int, float]
    rail_gbps: float
    hop_us: float = 1.0
    rail_hop_us: float = 8.0
    base_us: float = 15.0
    source: str = ""


@dataclass(frozen=True)
class Contention:
    """How many times as long things take that run at once: fitted to half of the rows of
    docs/performance.md, within what was measured there with two things at a time."""

    product_beside_nccl: float = 1.33
    product_beside_copies: float = 1.19
    product_beside_memory: float = 1.3
    gather_beside_product: float = 1.48
    reduce_beside_product: float = 1.26
    copies_beside_product: float = 1.27
    exchange_beside_product: float = 1.28
    memory_beside_product: float = 2.9
    memory_beside_nccl: float = 1.46


@dataclass(frozen=True)
class Machine:
    """host: how many times as long as the reference host this one takes for a launch. straggle:
    standard deviation of a host's step, in parts of it; the slowest of all is waited for."""

    gpu: Gpu
    network: Network
    contention: Contention = field(default_factory=Contention)
    host: float = 1.3
    straggle: float = 0.005


@dataclass(frozen=True)
class Group:
    """The ranks of one collective: how many, and how many of them share an NVLink domain."""

    size: int
    in_domain: int


def _reached(table: Mapping[int, float], ranks: int) -> float:
    """Of the row for as many ranks or, where there is none, the next larger, else the largest."""
    known = sorted(table)
    row = next((size for size in known if size >= ranks), known[-1])
    return table[row]


def collective_seconds(
    kind: Kind, nbytes: float, group: Group, network: Network, copy_engine: bool = False
) -> float:
    """Alone. nbytes: of the whole buffer. Ring inside a domain; between domains each GPU of a
    domain carries its part over its own rail. An all-reduce is a reduction and a gather."""
    if group.size == 1:
        return 0.0
    if kind is Kind.ALL_REDUCE:
        half = collective_seconds(Kind.REDUCE_SCATTER, nbytes, group, network)
        return 2 * half - network.base_us * 1e-6
    inside = group.in_domain
    domains = group.size / inside
    seconds, hops = 0.0, 0.0
    if inside > 1:
        copies = copy_engine and domains == 1
        reached = _reached(network.copy_gbps if copies else network.link_gbps, inside)
        seconds = nbytes * (inside - 1) / inside / (reached * 1e9)
        hops = (1 if copies else inside - 1) * network.hop_us
    if domains > 1:
        rails = nbytes * (1 - 1 / domains) / (inside * network.rail_gbps * 1e9)
        seconds = max(seconds, rails)
        # NCCL's rings have a step a domain; its trees (PAT) take a logarithm, for small messages.
        ring = (domains - 1) * network.rail_hop_us
        tree = 4 * math.log2(domains) * network.rail_hop_us
        hops += ring if nbytes / group.size > 64e3 else min(ring, tree)
    return seconds + (hops + network.base_us) * 1e-6


def operation_seconds(kind: Kind, amount: float, gpu: Gpu, kernels: int = 1) -> float:
    """Of what is no collective, alone."""
    return amount / (_rate(kind, gpu) * 1e12) + kernels * gpu.kernel_us * 1e-6


def _rate(kind: Kind, gpu: Gpu) -> float:
    """TFLOP/s or TB/s. Grouped FP8 products gain what others do."""
    rates = {
        Kind.PRODUCT: gpu.product_tflops,
        Kind.GROUPED: gpu.grouped_tflops,
        Kind.FP8_PRODUCT: gpu.fp8_product_tflops,
        Kind.FP8_GROUPED: gpu.grouped_tflops * gpu.fp8_product_tflops / gpu.product_tflops,
        Kind.BLOCK_PRODUCT: gpu.fp8_product_tflops * gpu.fp8_in_blocks,
        Kind.ATTENTION: gpu.attention_tflops,
    }
    return rates.get(kind, gpu.memory_tbps)


_MEASURED = "kernel times of 24 layers of Llama-3 8B on 2 H200 (docs/performance.md)"
_SCALED = "vendor's peaks, in the proportions that an H200 reaches; not measured here"

H200 = Gpu("H200", 140.0, 989.0, 690.0, 1250.0, 600.0, 430.0, 3.36, sustained=1.07, busy=0.72,
    source=_MEASURED,
)
GPUS: Mapping[str, Gpu] = {
    "h200": H200,
    "h100": replace(
        H200, name="H100", memory_gib=79.0, memory_tbps=2.35, source="as an H200; memory 3.35 TB/s"
    ),
    "b200": Gpu("B200", 178.0, 2250.0, 1570.0, 2840.0, 1370.0, 980.0, 5.6, source=_SCALED),
    "gb200": Gpu("GB200", 184.0, 2500.0, 1740.0, 3160.0, 1510.0, 1090.0, 5.6, source=_SCALED),
}
_HOPPER_LINK = {2: 238.0, 4: 298.0, 8: 320.0}
_HOPPER_COPY = {2: 306.0, 4: 340.0, 8: 350.0}
NETWORKS: Mapping[str, Network] = {
    "nvlink4-ib400": Network(
        "8 GPUs of NVLink 4, 400 Gb/s InfiniBand a GPU", 8, _HOPPER_LINK, _HOPPER_COPY, 42.0,
        source="2 and 4 H200 measured (docs/performance.md); 8, and between hosts, assumed: 85% of "
        "the links",
    ),
    "nvlink5-ib400": Network(
        "8 GPUs of NVLink 5, 400 Gb/s InfiniBand a GPU", 8,
        {n: 2 * gbps for n, gbps in _HOPPER_LINK.items()},
        {n: 2 * gbps for n, gbps in _HOPPER_COPY.items()}, 42.0, source=_SCALED,
    ),
    "nvl72-ib400": Network(
        "72 GPUs of NVLink 5, 400 Gb/s InfiniBand a GPU", 72,
        {n: 2 * gbps for n, gbps in (_HOPPER_LINK | {72: 320.0}).items()},
        {n: 2 * gbps for n, gbps in (_HOPPER_COPY | {72: 350.0}).items()}, 42.0, source=_SCALED,
    ),
}
NETWORK_OF = {
    "h100": "nvlink4-ib400", "h200": "nvlink4-ib400", "b200": "nvlink5-ib400",
    "gb200": "nvl72-ib400",
}  # fmt: skip


def machine_named(gpu: str, network: str | None = None) -> Machine:
    """From the tables; ValueError lists the rows."""
    if gpu not in GPUS:
        raise ValueError(f"--gpu {gpu!r} is unknown: use one of {sorted(GPUS)}")
    name = network or NETWORK_OF[gpu]
    if name not in NETWORKS:
        raise ValueError(f"--network {name!r} is unknown: use one of {sorted(NETWORKS)}")
    return Machine(GPUS[gpu], NETWORKS[name])
