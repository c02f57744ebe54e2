"""What it takes to quantise main weights once, with Transformer Engine's function and with ours.

    python scripts/fp8_cast_times.py [--layers 24] [--ranks 2] [--only current,delayed,blockwise]
    python scripts/fp8_cast_times.py --tune

One GPU that has the rows of one rank of `--ranks`, of the linear weights of Llama-3 8B's layers. A
line for each way: host ms (until the call returns), wall ms (until the device is done), ms of
kernels, number of kernels, copies and synchronisations, then the kernels and the operations on the
host that take longest.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformer_engine.pytorch  # noqa: F401  loads the extension
import transformer_engine_torch as tex
from torch.autograd import DeviceType
from transformer_engine.pytorch.tensor import utils
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)

from megatron_fsdp_adapter.core.layout import ParamSpec, plan_group, row_granularity
from megatron_fsdp_adapter.quantised import triton_e4m3
from megatron_fsdp_adapter.quantised.e4m3 import (
    BlockCast,
    OwnRows,
    TensorCast,
    write_scales,
)

SHAPES = {"qkv": (6144, 4096), "proj": (4096, 4096), "fc1": (28672, 4096), "fc2": (4096, 14336)}
E4M3 = tex.DType.kFloat8E4M3
RECIPES = ("current", "delayed", "blockwise")
WAITS = ("StreamSynchronize", "EventSynchronize", "Memcpy")
quantise_by_te = getattr(utils, "quantize_master_weights", utils.cast_master_weights_to_fp8)
Step = Callable[[], None]


@dataclass
class Weight:
    """One weight: its parameter object, the rows of this rank, and memory for their bytes."""

    param: torch.Tensor
    start: int
    main: torch.Tensor
    shard: torch.Tensor

    def rows(self) -> OwnRows:
        return OwnRows(tuple(self.param.shape), self.start, self.main, self.shard)


def quantizer(recipe: str, slots: torch.Tensor) -> Any:
    """As TE's modules make it for a weight. slots: (2,) scale and amax, for delayed scaling."""
    if recipe == "delayed":
        return Float8Quantizer(slots[:1], slots[1:], E4M3)
    if recipe == "current":
        return Float8CurrentScalingQuantizer(E4M3, slots.device)
    return Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True)


def build(recipe: str, layers: int, ranks: int) -> list[Weight]:
    granule = 16 if recipe == "blockwise" else 1
    specs = [
        ParamSpec(i, (name,), shape, torch.bfloat16, True, granule * row_granularity(shape))
        for i, (name, shape) in enumerate(SHAPES.items())
    ]
    layout = plan_group(specs, ranks, align=32)
    found = []
    for _ in range(layers):
        for index, shape in enumerate(SHAPES.values()):
            value = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
            slots = torch.tensor([448 / 0.12, 0.0], device="cuda")
            param = quantizer(recipe, slots)(value)
            own = layout.shard_range(index, 0)
            main = value.view(-1)[own.start : own.stop].float()
            main += torch.randn_like(main) * 1e-4
            found.append(Weight(param, own.start, main, torch.empty_like(main, dtype=torch.uint8)))
    return found


def by_te(weights: list[Weight], shards: bool) -> Step:
    """Into the whole weights, as Megatron's DDP has it, or into shards, as its FSDP."""
    arguments = (
        [weight.param for weight in weights],
        [weight.main if weight.main.numel() else None for weight in weights],
        [weight.start for weight in weights],
        dist.group.WORLD,
        [weight.shard for weight in weights] if shards else None,
    )
    return functools.partial(quantise_by_te, *arguments, manual_post_all_gather_processing=True)


def columnwise_of_te(weights: list[Weight]) -> Step:
    """What Megatron's DDP runs after its gather: a transpose of every whole weight."""
    params = [weight.param for weight in weights]
    return lambda: utils.post_all_gather_processing(params)


def ours(recipe: str, weights: list[Weight]) -> Step:
    """The same values by our kernels, scales of all weights in one vector."""
    rows = [weight.rows() for weight in weights]
    if recipe == "blockwise":
        blocks = BlockCast(rows, torch.bfloat16)
        numel = blocks.amax_numel
    else:
        cast, numel = TensorCast(rows, torch.bfloat16), len(rows)
    amaxes, scales, inverses = torch.ones(3, numel, device="cuda").unbind()

    def step() -> None:
        amaxes.zero_()
        if recipe == "delayed":
            cast.finish(scales, amaxes)
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX)
            torch.reciprocal(scales, out=inverses)
            return
        (blocks if recipe == "blockwise" else cast).begin(amaxes)
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX)
        write_scales(amaxes, scales, inverses, recipe == "blockwise")
        (blocks if recipe == "blockwise" else cast).finish(scales)

    return step


def times(step: Step, repeats: int = 5) -> tuple[float, float]:
    """Medians of host ms and wall ms."""
    host, wall = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        host.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        wall.append(time.perf_counter() - started)
    return statistics.median(host) * 1e3, statistics.median(wall) * 1e3


def report(name: str, step: Step, top: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            step()
        host, wall = times(step)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            step()
            torch.cuda.synchronize()
        more = torch.cuda.max_memory_allocated() - before
    kernels, spent, copies, waits = 0, Counter[str](), 0, 0
    device, on_host = 0.0, Counter[str]()
    for event in profile.events():
        if event.device_type == DeviceType.CUDA:
            if event.name.startswith("nccl:"):  # a range around kernels, not one of them
                continue
            device += event.time_range.elapsed_us()
            spent[event.name] += event.time_range.elapsed_us()
            is_copy = event.name.startswith(("Memcpy", "Memset"))
            copies, kernels = copies + is_copy, kernels + (not is_copy)
        else:
            on_host[event.name] += event.self_cpu_time_total
            # The one of the whole device is that of this script.
            waits += event.name.startswith("cuda") and event.name.endswith(WAITS)
    print(
        f"{name:34s} host {host:7.1f}  wall {wall:7.1f}  kernels {device / 1e3:7.1f} ms  "
        f"{kernels:5d} kernels {copies:4d} copies {waits:3d} syncs  {more / 2**30:5.2f} GiB more"
    )
    for label, found in (("gpu", spent), ("host", on_host)):
        for event_name, us in found.most_common(top):
            print(f"    {label:4s} {us / 1e3:8.2f} ms  {event_name[:90]}")


def without_transposes(weights: list[Weight]) -> Step:
    """TE's function with quantizers that are told that nobody wants columns. It makes those of
    current scaling itself, by the constructor's defaults."""
    for weight in weights:
        weight.param._quantizer.set_usage(rowwise=True, columnwise=False)
    Float8Quantizer.__init__.__kwdefaults__["columnwise"] = False
    return by_te(weights, False)


def milliseconds(step: Step, repeats: int = 10) -> float:
    """On the device, each of some calls in a row."""
    step()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        step()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def tune(layers: int, ranks: int) -> None:
    """Times of our passes by registers and warps of a program."""
    rows = [weight.rows() for weight in build("blockwise", layers, ranks)]
    held = sum(own.numel for own in rows)
    tensors, blocks = TensorCast(rows, torch.bfloat16), BlockCast(rows, torch.bfloat16)
    amaxes, scales = torch.ones(2, blocks.amax_numel, device="cuda").unbind()
    passes: dict[str, tuple[str, int, Step]] = {
        "amax": ("STEP", 4, lambda: tensors.begin(amaxes)),
        "cast": ("STEP", 5, lambda: tensors.finish(scales)),
        "both": ("STEP", 5, lambda: tensors.finish(scales, amaxes)),
        "whole blocks": ("WHOLE_WARPS", 5, lambda: blocks.begin(amaxes)),
    }
    for name, (size, nbytes, step) in passes.items():
        found = []
        for value in {"STEP": (1024, 2048, 4096, 8192), "WHOLE_WARPS": (4, 8, 16)}[size]:
            for warps in (4, 8) if size == "STEP" else (4,):
                chosen = {size: value, "WARPS": warps}
                with mock.patch.multiple(triton_e4m3, **chosen):
                    ms = milliseconds(step)
                found.append(f"{value}/{warps} {ms:.2f} ({held * nbytes / ms / 1e9:.2f})")
        print(f"{name}, {size}/WARPS ms (TB/s): " + ", ".join(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default=",".join(RECIPES))
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--tune", action="store_true", help="only times of our own passes")
    given = parser.parse_args()
    torch.cuda.set_device(0)
    if given.tune:
        tune(given.layers, given.ranks)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        for recipe in given.only.split(","):
            weights = build(recipe, given.layers, given.ranks)
            held = sum(weight.main.numel() for weight in weights)
            print(f"{recipe}: {len(weights)} weights, {held / 1e9:.2f}e9 elements on this rank")
            report(f"{recipe}: TE, whole weights", by_te(weights, False), given.top)
            report(f"{recipe}: TE, shards", by_te(weights, True), given.top)
            report(f"{recipe}: TE, columnwise", columnwise_of_te(weights), given.top)
            report(f"{recipe}: ours", ours(recipe, weights), given.top)
            if recipe != "blockwise":
                defaults = dict(Float8Quantizer.__init__.__kwdefaults__)
                report(f"{recipe}: TE, no columns", without_transposes(weights), given.top)
                Float8Quantizer.__init__.__kwdefaults__.update(defaults)
            del weights
            torch.cuda.empty_cache()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
