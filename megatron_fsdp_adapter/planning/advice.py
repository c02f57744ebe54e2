"""Advice for a run: whether another configuration is expected to be faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_fsdp_adapter.megatron.options.sizes import stage_layers
from megatron_fsdp_adapter.models.sources import from_options
from megatron_fsdp_adapter.models.spec import Parallel
from megatron_fsdp_adapter.sharding.unsharded_budget import GIB

from .configurations import POOLS, Configuration
from .features import features_of
from .machine import GPUS, machine_named
from .prediction import predict
from .report import ddp_options, model_options
from .search import Wanted, plan

WORTH = 1.10
"""Ratio to the best time above which another configuration is reported."""

TRIES = 5


def gpu_in_tables(name: str) -> str | None:
    """The row of the table for torch's name of a device; None if there is none."""
    words = name.lower().replace("-", " ").split()
    return next((row for row in sorted(GPUS, key=len, reverse=True) if row in words), None)


def configuration_of(options: Mapping[str, Any], world_size: int) -> Configuration:
    """The configuration by a run's options (names of Megatron's configs), with Megatron's defaults.
    Raises ValueError if the sizes do not divide the world size."""

    def size(name: str) -> int:
        return options.get(name) or 1

    virtual = len(stage_layers(options)[0]) if options.get("num_layers") else 1
    parallel = Parallel(
        size("tensor_model_parallel_size"), size("pipeline_model_parallel_size"),
        virtual, size("context_parallel_size"),
        size("expert_model_parallel_size"), options.get("recompute_granularity") == "full",
    )  # fmt: skip
    return Configuration(
        world_size, parallel, options.get("data_parallel_sharding_strategy") or "no_shard",
        size("num_distributed_optimizer_instances"),
        options.get("outer_dp_sharding_strategy") == "optim"
        and size("num_distributed_optimizer_instances") > 1,
        size("micro_batch_size"),
        copies=bool(options.get("fsdp_copy_engine_all_gather"))
        and bool(options.get("fsdp_copy_engine_reduce_scatter")),
        graph=str(options.get("cuda_graph_impl")) == "full_iteration",
        separate_gathers=bool(options.get("create_all_gather_group")),
        fused=bool(options.get("gradient_accumulation_fusion", True)),
        features=features_of(options),
    )  # fmt: skip


def advice(options: Mapping[str, Any], world_size: int, gpu: str) -> list[str]:
    """Lines about memory and about a configuration that is more than 10% faster; may be empty. gpu:
    a row of the table.

    Raises:
        ValueError: the options describe no model or run that can be planned.
    """
    machine = machine_named(gpu)
    spec = from_options(options, "the model")
    chosen = configuration_of(options, world_size)
    batch = options.get("global_batch_size") or chosen.data_parallel * chosen.microbatch
    now = predict(spec, chosen, machine, batch)
    best = plan(Wanted(
        spec, machine, world_size, batch, machine.gpu.memory_gib, {}, TRIES, chosen.features
    )).predictions[0]  # fmt: skip
    lines = []
    if POOLS in now.memory:
        lines.append(
            f"layer graphs reserve {now.memory[POOLS] / GIB:.1f} GiB for activations, in one pool "
            "for each pass in flight, which nothing else can use"
        )
    if now.peak_bytes > machine.gpu.memory_gib * GIB:
        lines.append(
            f"{now.peak_bytes / GIB:.0f} GiB peak memory is expected, but the device has "
            f"{machine.gpu.memory_gib:.0f}. See `estimate`, or choose a configuration of `plan`"
        )
    if now.ms > WORTH * best.ms:
        other = replace(best.configuration, fused=chosen.fused)
        named = {**model_options(spec, other), **ddp_options(other)}
        chosen_words = ", ".join(f"{name}={value}" for name, value in named.items())
        lines.append(
            f"{now.ms:,.0f} ms a step are expected, {now.ms / best.ms - 1:.0%} more than the "
            f"{best.ms:,.0f} ms with {chosen_words}"
        )
    return lines
