"""What a way to split a model takes at least, in seconds and bytes, without the engine: it orders
candidates and leaves out hopeless ones; nobody is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from megatron_fsdp_adapter.core.config import STRATEGIES

from .configurations import Configuration, groups
from .features import MUON, Features
from .machine import Gpu, Machine, collective_seconds, operation_seconds
from .program import COLLECTIVES, Kind
from .shapes import (
    DENSE,
    EXPERT,
    Parallel,
    Shape,
    activation_bytes,
    head_work,
    layer_bytes,
    layer_work,
    layers_of,
    waits_for_longer,
)
from .timed_modules import Work


class Split:
    """A way to split, which many configurations share.

    Attributes:
        parallel, microbatch: of it. microbatches: of a step.
        compute: seconds of a step on the slowest stage, bubble left out; bubble: in parts of that.
        numel: elements of a rank's part of the model, by domain, before sharding.
        activations: bytes at the end of a forward.
    """

    def __init__(
        self, shape: Shape, machine: Machine, gpus: int, global_batch: int, parallel: Parallel,
        microbatch: int, features: Features,
    ) -> None:
        self.shape, self.machine, self.parallel = shape, machine, parallel
        self.microbatch, self._features = microbatch, features
        ranks = gpus // (parallel.tensor * parallel.pipeline * parallel.context)
        self.ranks = ranks * parallel.context
        self.microbatches = global_batch // (ranks * microbatch)
        self.bubble = (parallel.pipeline - 1) / parallel.virtual / self.microbatches
        self.numel = _numel(shape, parallel)
        self.compute = self.microbatches * self._stage_seconds() * machine.gpu.sustained

    def _stage_seconds(self) -> float:
        """Of a microbatch on the slowest stage: layers cannot be cut, and the last has the loss."""
        shape, parallel, gpu = self.shape, self.parallel, self.machine.gpu
        first, last = (len(layers_of(shape, parallel, at)) * (
            1 + waits_for_longer(shape, parallel, at)) for at in (0, parallel.pipeline - 1))
        tokens = self.microbatch * shape.seq_length / parallel.context
        number = shape.gpt.num_layers - 1
        *layer, _ = layer_work(shape, parallel, tokens, number, self._features.quantised)
        own, head = _seconds(layer, gpu), _seconds(head_work(shape, parallel, tokens), gpu)
        return max(first * own, last * own + head)

    @cached_property
    def activations(self) -> float:
        in_flight = self.parallel.in_flight(0, self.microbatches)
        total = activation_bytes(self.shape, self.parallel, self.microbatch, in_flight)
        away = self._features.host_layers
        return total - away * layer_bytes(self.shape, self.parallel, self.microbatch)

    @property
    def least_seconds(self) -> float:
        """Nothing but compute and the pipeline's bubble."""
        return self.compute * (1 + self.bubble)

    @property
    def least_bytes(self) -> float:
        """With everything sharded over all ranks."""
        ranks = {DENSE: self.ranks, EXPERT: self.ranks * self.parallel.tensor}
        state = 0 if self._features.streamed else 8
        held = sum(
            state * elements / max(1.0, ranks[domain] / (
                self.parallel.expert if domain == EXPERT else 1
            ))
            for domain, elements in self.numel.items()
        )  # fmt: skip
        return self.activations + held

    def seconds(self, chosen: Configuration) -> float:
        """Compute, what communication cannot hide beside it, and the optimizer."""
        machine, row = self.machine, STRATEGIES[chosen.strategy]
        where, count = groups(chosen, machine), self.microbatches
        layers = max(1, self.shape.gpt.num_layers // self.parallel.pipeline)
        link = self._link(chosen, layers)
        own = 0.0
        if self.parallel.tensor > 1:
            whole = 2 * self.microbatch * self.shape.seq_length * self.shape.gpt.hidden_size
            one = collective_seconds(Kind.ALL_GATHER, whole, where["tensor"], machine.network)
            own = 8 * one * layers * count
        slowed = 0.15 * min(link, self.compute) * (0.4 if chosen.copies else 1.0)
        held = sum(
            elements / (where[domain].size if row.shard_main else 1)
            for domain, elements in self.numel.items()
        )
        rate = machine.gpu.memory_tbps * 1e12
        if chosen.features.streamed:
            rate = 3 * machine.gpu.from_host_gbps * 1e9
        host = 0.0 if chosen.fixed else 5e-3 * layers * count * machine.host
        busy = max(self.compute + slowed + own, host) * (1 + self.bubble)
        return busy + max(0.0, link - 0.8 * busy) + 36 * held / rate

    def _link(self, chosen: Configuration, layers: int) -> float:
        """Seconds of gathers and reductions."""
        row, where = STRATEGIES[chosen.strategy], groups(chosen, self.machine)
        count, features, network = self.microbatches, chosen.features, self.machine.network
        gathers = (2 * count if row.shard_weights else 1) if row.shard_main else 0
        reduces = count if row.shard_grads else 1
        wire = 2 if features.bf16_wire else 4
        weight = 1 if features.quantised.weights else 2
        link = 0.0
        for domain, elements in self.numel.items():
            for times, kind, size in (
                (gathers, Kind.ALL_GATHER, weight), (reduces, Kind.REDUCE_SCATTER, wire)
            ):  # fmt: skip
                one = collective_seconds(
                    kind, size * elements / layers, where[domain], network, chosen.copies
                )
                link += times * layers * one
            link += collective_seconds(
                Kind.ALL_REDUCE, 4 * elements / max(1, where[domain].size),
                where[f"{domain} outer"], network,
            )  # fmt: skip
        return link

    def at_least_bytes(self, chosen: Configuration) -> float:
        """States and activations, without planning."""
        row, features = STRATEGIES[chosen.strategy], chosen.features
        state = 8 if features.optimizer == MUON else 12
        total = self.activations
        for domain, elements in self.numel.items():
            inner, outer = chosen.shards[domain]
            part = elements / inner
            held = part / (outer if chosen.outer_optim else 1) if row.shard_main else elements
            total += 0 if features.streamed else state * held
            if self.microbatches > 1 or not row.shard_grads:
                total += 4 * (part if row.shard_grads else elements)
            if not row.shard_weights:
                total += (1 if features.quantised.weights else 2) * elements
        return total


def _seconds(passes: Iterable[Sequence[Work]], gpu: Gpu) -> float:
    """Of what computes in them, alone."""
    return sum(
        operation_seconds(work.kind, work.amount, gpu, work.kernels)
        for works in passes for work in works if work.kind not in COLLECTIVES
    )


def _numel(shape: Shape, parallel: Parallel) -> dict[str, float]:
    """Elements of a rank's part of the model, by domain."""
    split = parallel.tensor * parallel.pipeline
    found = {DENSE: 2 * shape.vocabulary * shape.gpt.hidden_size / split, EXPERT: 0.0}
    of_experts = sum(shape.is_moe(layer) for layer in range(shape.gpt.num_layers))
    dense = shape.gpt.num_layers - of_experts
    found[DENSE] += shape.gpt.num_layers * shape.attention_numel / split
    found[DENSE] += dense * shape.mlp_numel(shape.gpt.ffn) / split
    if shape.experts is not None:
        found[DENSE] += of_experts * shape.mlp_numel(shape.experts.shared) / split
        whole = shape.mlp_numel(shape.experts.ffn) * shape.experts.number
        found[EXPERT] = of_experts * whole / parallel.expert / parallel.pipeline
    return found
