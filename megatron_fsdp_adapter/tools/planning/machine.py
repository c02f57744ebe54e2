"""Costs of a machine: GPUs, network, host, and contention between concurrent operations.

The tables record the source of each number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .program import Kind


@dataclass(frozen=True)
class Gpu:
    """A device and its rates without contention.

    Attributes:
        memory_gib: memory of the device, by nvidia-smi. reserved_gib: part of it for contexts, NCCL
            and fragmentation.
        peak_tflops: the vendor's dense bf16 peak, to which MFU refers.
        product_tflops: rate that large bf16 GEMMs reach; grouped_tflops: grouped GEMMs.
        attention_tflops: rate of causal attention, forward and backward together, counting half of
            the square.
        memory_tbps: rate that memory-bound kernels reach, bytes read and written. kernel_us: gap
            between kernels of a stream.
        sustained: factor by which the power limit slows GEMMs that run all the time; busy: part of
            the time from which on it slows them, growing linearly.
    """

    name: str
    memory_gib: float
    peak_tflops: float
    product_tflops: float
    grouped_tflops: float
    attention_tflops: float
    memory_tbps: float
    reserved_gib: float = 6.0
    kernel_us: float = 1.96
    sustained: float = 1.0
    busy: float = 0.75


@dataclass(frozen=True)
class Network:
    """Two levels: an NVLink domain, and rail-optimized links between domains, one a GPU.

    Attributes:
        domain: GPUs of one NVLink domain. link_gbps: number of ranks -> GB/s of a GPU's ring inside
            a domain, as `_reached` reads it; copy_gbps: the same with copy engines.
        rail_gbps: reached GB/s of one GPU's link to other domains.
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


@dataclass(frozen=True)
class Machine:
    """A GPU, its network and its host.

    host: launch time relative to the reference host. straggle: relative standard deviation of a
    host's step time; a step takes as long as the slowest host's. The others are slowdown factors of
    concurrent operations, fitted to half of the measured rows
    (docs/contributing/plan_measured.md)."""

    gpu: Gpu
    network: Network
    host: float = 1.3
    straggle: float = 0.005
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
class Group:
    """Number of ranks of one collective, and of those that share an NVLink domain."""

    size: int
    in_domain: int


def _reached(table: Mapping[int, float], ranks: int) -> float:
    """The value of the row for `ranks`, else of the next larger row, else of the largest."""
    known = sorted(table)
    for size in known:
        if size >= ranks:
            return table[size]
    return table[known[-1]]


def collective_seconds(
    kind: Kind, nbytes: float, group: Group, network: Network, copy_engine: bool = False
) -> float:
    """Seconds of a collective without contention. nbytes: size of the whole buffer.

    Inside a domain it is a ring. Between domains each GPU of a domain sends its part over its rail;
    of the two times the longer counts. An all-reduce is a reduce-scatter and an all-gather."""
    if group.size == 1:
        return 0.0
    if kind is Kind.ALL_REDUCE:
        half = collective_seconds(Kind.REDUCE_SCATTER, nbytes, group, network)
        return 2 * half - network.base_us * 1e-6  # the base latency counts once
    inside = group.in_domain
    domains = group.size / inside
    seconds = 0.0
    hops = 0.0
    if inside > 1:
        reached = _reached(network.link_gbps, inside)
        hops = (inside - 1) * network.hop_us
        if copy_engine and domains == 1:
            reached = _reached(network.copy_gbps, inside)
            hops = network.hop_us
        seconds = nbytes * (inside - 1) / inside / (reached * 1e9)
    if domains > 1:
        rails = nbytes * (1 - 1 / domains) / (inside * network.rail_gbps * 1e9)
        seconds = max(seconds, rails)
        # NCCL's rings have one step per domain; its trees (PAT), for small messages, a logarithm of
        # them.
        ring = (domains - 1) * network.rail_hop_us
        tree = 4 * math.log2(domains) * network.rail_hop_us
        hops += ring if nbytes / group.size > 64e3 else min(ring, tree)
    return seconds + (hops + network.base_us) * 1e-6


def operation_seconds(kind: Kind, amount: float, gpu: Gpu, kernels: int = 1) -> float:
    """Seconds of an operation other than a collective, without contention."""
    rates = {
        Kind.PRODUCT: gpu.product_tflops,
        Kind.GROUPED: gpu.grouped_tflops,
        Kind.ATTENTION: gpu.attention_tflops,
    }
    rate = rates.get(kind, gpu.memory_tbps)  # TFLOP/s or TB/s
    return amount / (rate * 1e12) + kernels * gpu.kernel_us * 1e-6


# By kernel times of 24 layers of Llama-3 8B on 2 H200 (docs/performance.md).
H200 = Gpu("H200", 140.0, 989.0, 690.0, 600.0, 430.0, 3.36, sustained=1.07, busy=0.72)
GPUS: Mapping[str, Gpu] = {
    "h200": H200,
    # As an H200, with memory of 3.35 TB/s.
    "h100": replace(H200, name="H100", memory_gib=79.0, memory_tbps=2.35),
    # The vendor's peaks, scaled by the fractions that an H200 reaches; not measured.
    "b200": Gpu("B200", 178.0, 2250.0, 1570.0, 1370.0, 980.0, 5.6),
    "gb200": Gpu("GB200", 184.0, 2500.0, 1740.0, 1510.0, 1090.0, 5.6),
}
_HOPPER_LINK = {2: 238.0, 4: 298.0, 8: 320.0}
_HOPPER_COPY = {2: 306.0, 4: 340.0, 8: 350.0}


def _doubled(table: Mapping[int, float]) -> Mapping[int, float]:
    return {ranks: 2 * gbps for ranks, gbps in table.items()}


NETWORKS: Mapping[str, Network] = {
    # 2 and 4 H200 measured (docs/performance.md); 8, and between hosts, assumed: 85% of the links.
    "nvlink4-ib400": Network(
        "8 GPUs of NVLink 4, 400 Gb/s InfiniBand a GPU",
        8,
        _HOPPER_LINK,
        _HOPPER_COPY,
        42.0,
    ),
    # Scaled as the GPUs; not measured.
    "nvlink5-ib400": Network(
        "8 GPUs of NVLink 5, 400 Gb/s InfiniBand a GPU",
        8,
        _doubled(_HOPPER_LINK),
        _doubled(_HOPPER_COPY),
        42.0,
    ),
    "nvl72-ib400": Network(
        "72 GPUs of NVLink 5, 400 Gb/s InfiniBand a GPU",
        72,
        _doubled(_HOPPER_LINK | {72: 320.0}),
        _doubled(_HOPPER_COPY | {72: 350.0}),
        42.0,
    ),
}
NETWORK_OF = {
    "h100": "nvlink4-ib400", "h200": "nvlink4-ib400", "b200": "nvlink5-ib400",
    "gb200": "nvl72-ib400",
}  # fmt: skip


def machine_named(gpu: str, network: str | None = None) -> Machine:
    """A machine from the tables. network: default: that of the kind of GPU."""
    return Machine(GPUS[gpu], NETWORKS[network or NETWORK_OF[gpu]])
