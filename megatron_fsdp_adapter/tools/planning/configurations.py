"""A configuration of a run, and its expected memory by the formulas of `estimate`."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_fsdp_adapter.core.config import STRATEGIES, EngineConfig, Strategy
from megatron_fsdp_adapter.megatron.options import ddp_options
from megatron_fsdp_adapter.megatron.options.cuda_graphs import FULL_ITERATION
from megatron_fsdp_adapter.megatron.options.staging_options import slots_wanted
from megatron_fsdp_adapter.plan.memory import (
    BACKWARD_TO_STEP,
    FORWARD_TO_BACKWARD,
    LIFE,
    PERSISTENT,
    REDUCE_BUCKET,
    UNIT_IN_USE,
    Bytes,
    Precision,
)
from megatron_fsdp_adapter.plan.unsharded_budget import GIB
from megatron_fsdp_adapter.tools.models.spec import DENSE, EXPERT, ModelSpec, Parallel

from .machine import Group, Machine
from .planned import PlannedModel, Replicas, layer_numels, planned_units
from .shapes import activation_bytes
from .timed_modules import EXPERTS

ACTIVATIONS = "activations"
RESERVED = "contexts, NCCL, fragments"


@dataclass(frozen=True)
class Configuration:
    """A user's choices. Compute is in bf16, and communication of gradients in fp32.

    instances: optimizer instances, which are the outer axis. outer_optim: True if instances also
    shard main weights and state. microbatch: number of sequences. copies: True if copy engines move
    weights and gradients. graph: True for one CUDA graph of the whole step. separate_gathers: True
    if gathers have a communicator of their own. fused: True if GEMMs write weight gradients.
    expert_strategy, expert_instances: those of experts, if they have others."""

    gpus: int
    parallel: Parallel = field(default_factory=Parallel)
    strategy: str = "optim_grads_params"
    instances: int = 1
    outer_optim: bool = False
    microbatch: int = 1
    copies: bool = False
    graph: bool = False
    separate_gathers: bool = False
    fused: bool = True
    expert_strategy: str | None = None
    expert_instances: int | None = None

    def strategy_of(self, domain: str) -> Strategy:
        """The strategy of a domain."""
        name = self.strategy
        if domain == EXPERT and self.expert_strategy is not None:
            name = self.expert_strategy
        return STRATEGIES[name]

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel ranks, of all instances together."""
        return self.gpus // (self.parallel.tensor * self.parallel.pipeline)

    @property
    def experts_over(self) -> int:
        """Number of ranks with the same experts, of all instances together."""
        return max(1, self.gpus // (self.parallel.pipeline * self.parallel.expert))

    def microbatches(self, global_batch: int) -> int:
        """Microbatches per rank. Raises ValueError if the batch is no multiple of ranks times
        microbatch."""
        each = self.data_parallel * self.microbatch
        if global_batch % each:
            raise ValueError(
                f"--global-batch-size {global_batch} is no multiple of {each}: data-parallel "
                f"{self.data_parallel} x micro batch {self.microbatch}"
            )
        return global_batch // each

    @property
    def shards(self) -> dict[str, tuple[int, int]]:
        """Domain -> (ranks of an instance, instances)."""
        of_experts = self.expert_instances or self.instances
        return {
            DENSE: (self.data_parallel // self.instances, self.instances),
            EXPERT: (self.experts_over // of_experts, of_experts),
        }

    @property
    def unsharded(self) -> list[str]:
        """The domains that a strategy should shard, but each of whose instances has one rank."""
        found = []
        for name, (ranks, _) in self.shards.items():
            if self.strategy_of(name).shard_main and ranks == 1 < self.data_parallel:
                found.append(name)
        return found

    @property
    def slots(self) -> dict[str, Any]:
        """The fixed slots of communication buffers, by the options of the DDP config."""
        return slots_wanted(
            Namespace(
                fsdp_double_buffer=self.graph and self.strategy == "optim_grads_params",
                fsdp_copy_engine_all_gather=self.copies,
                fsdp_copy_engine_reduce_scatter=self.copies,
            )
        )

    @property
    def engine(self) -> EngineConfig:
        """The engine config that the wrapper would pass."""
        unsharded = []  # domains of one rank, as in `with_single_rank_domains`
        for name, (ranks, _) in self.shards.items():
            if self.strategy_of(name).shard_grads and ranks == 1:
                unsharded.append(name)
        return EngineConfig(
            self.strategy_of(DENSE),
            domain_strategies=((EXPERT, self.strategy_of(EXPERT)),) if self.expert_strategy else (),
            poison_buffers=False,
            whole=tuple(unsharded),
            shard_outer=self.outer_optim and self.instances > 1,
            **self.slots,
        )

    @property
    def name(self) -> str:
        """Name for a table, of words of Megatron's flags."""
        parallel = self.parallel
        sizes = {
            "TP": parallel.tensor,
            "PP": parallel.pipeline,
            "VPP": parallel.virtual,
            "EP": parallel.expert,
            "instances": self.instances,
            "expert instances": self.expert_instances or 0,
            "micro": self.microbatch,
        }
        flags = {
            "outer optim": self.outer_optim,
            "copy engines": self.copies,
            "graph": self.graph,
            "all-gather group": self.separate_gathers,
            "recompute": parallel.recompute,
        }
        parts = [self.strategy]
        if self.expert_strategy is not None:
            parts.append(f"experts {self.expert_strategy}")
        parts += [f"{key} {size}" for key, size in sizes.items() if size > 1]
        if self.expert_instances == 1 < self.instances:
            parts.append("expert instances 1")
        parts += [key for key, on in flags.items() if on]
        return ", ".join(parts)


def unit_numel(spec: ModelSpec, chosen: Configuration, stage: int = 0) -> int:
    """Elements up to which the layers of a model chunk are grouped into a unit; 0: not grouped."""
    asked = Namespace(cuda_graph_impl=FULL_ITERATION if chosen.graph else None)
    numels = layer_numels(spec, chosen.parallel.split, stage)
    of_chunk = numels[: -(-len(numels) // chosen.parallel.virtual)]
    return ddp_options.unit_numel(asked, asked, of_chunk)


def planned(spec: ModelSpec, chosen: Configuration, stage: int = 0) -> PlannedModel:
    """The planned model of a rank of a pipeline stage."""
    replicas = {}
    shards = {}
    for domain, (ranks, instances) in chosen.shards.items():
        replicas[domain] = Replicas(instances, chosen.engine.shard_outer)
        shards[domain] = replicas[domain].shards(ranks * instances)
    units = planned_units(
        spec,
        shards[DENSE],
        shards[EXPERT],
        torch.bfloat16,
        unit_numel=unit_numel(spec, chosen, stage),
        fused=chosen.fused,
        split=chosen.parallel.split,
        stage=stage,
    )
    experts = chosen.strategy_of(EXPERT)
    return PlannedModel(units, chosen.slots, of_experts=experts, replicas=replicas)


def memory(spec: ModelSpec, chosen: Configuration, machine: Machine, microbatches: int) -> Bytes:
    """Bytes by kind, at their peak, on the first rank of the stage that needs most. The kinds are
    those of `estimate`, with activations and a reserve."""
    # The first stage holds most activations, the last one the output layer.
    stages = sorted({0, chosen.parallel.pipeline - 1})
    needed = [_stage_memory(spec, chosen, machine, microbatches, stage) for stage in stages]
    return max(needed, key=_total)


def _total(kinds: Bytes) -> int:
    return sum(kinds.values())


def _stage_memory(
    spec: ModelSpec, chosen: Configuration, machine: Machine, microbatches: int, stage: int
) -> Bytes:
    model = planned(spec, chosen, stage)
    strategy = STRATEGIES[chosen.strategy]
    held = model.bytes_held(strategy, Precision(), 0)
    in_flight = chosen.parallel.in_flight(stage, microbatches)
    activations = activation_bytes(spec, chosen.parallel, chosen.microbatch, in_flight)
    held[RESERVED] = int(machine.gpu.reserved_gib * GIB)
    return at_its_most(held, activations, microbatches > 1)


def at_its_most(held: Bytes, activations: int, accumulates: bool) -> Bytes:
    """Bytes by kind at the event with the highest total.

    The events are the end of a forward (with all activations), the end of a backward (with
    gradients and buckets), and the begin of a forward. accumulates: True if gradients of earlier
    microbatches exist in a forward."""
    of_life: dict[str, Bytes] = defaultdict(dict)
    for kind, nbytes in held.items():
        of_life[LIFE.get(kind, PERSISTENT)][kind] = nbytes
    kept = of_life[PERSISTENT]
    grads = of_life[BACKWARD_TO_STEP]
    passing = of_life[UNIT_IN_USE]
    weights = {kind: n for kind, n in passing.items() if kind != REDUCE_BUCKET}
    forward_ends = {**kept, **grads} if accumulates else dict(kept)
    forward_ends |= weights | of_life[FORWARD_TO_BACKWARD]
    forward_ends[ACTIVATIONS] = activations
    backward_ends = {**kept, **grads, **passing}
    forward_begins = {**kept, **grads, **weights}
    most = max(forward_ends, backward_ends, forward_begins, key=_total)
    return {kind: count for kind, count in most.items() if count}


def groups(chosen: Configuration, machine: Machine) -> dict[str, Group]:
    """Name of an axis -> its group. Tensor-parallel ranks are neighbors; then come data-parallel
    ranks, those of one instance first; then stages."""
    domain = machine.network.domain
    tensor = chosen.parallel.tensor
    expert = chosen.parallel.expert

    def spread(size: int, stride: int) -> Group:
        """A group of `size` ranks that are `stride` apart."""
        if size <= 1:
            return Group(size, 1)
        return Group(size, max(1, min(size, domain // stride)))

    inner, outer = chosen.shards[DENSE]
    expert_inner, expert_outer = chosen.shards[EXPERT]
    return {
        "tensor": spread(tensor, 1),
        DENSE: spread(inner, tensor),
        f"{DENSE} outer": spread(outer, inner * tensor),
        EXPERTS: spread(expert, 1),
        EXPERT: spread(expert_inner, expert),
        f"{EXPERT} outer": spread(expert_outer, expert_inner * expert),
    }
