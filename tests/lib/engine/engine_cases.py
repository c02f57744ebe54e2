"""A small model on the whole engine in one process: N pretended shards, collectives that write
what real ones would, and a runtime that checks every access.

`Rig` is the model with its engine; `Rig.step` is a training step as Megatron takes it.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter.build.building import with_single_rank_domains
from megatron_fsdp_adapter.build.grad_check import GradCheck
from megatron_fsdp_adapter.build.shard_attributes import mark_shard
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.distributed_index import FSDPDistributedIndex
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.engine.kept_parts import KeptParts
from megatron_fsdp_adapter.core.engine.partition import ManagedParam, managed_params, partition
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.runtime.device import HostRuntime, storage_bytes
from megatron_fsdp_adapter.core.topology import DENSE, EXPERT
from megatron_fsdp_adapter.optim.residency import Residency
from megatron_fsdp_adapter.optim.step import adopt
from megatron_fsdp_adapter.plan.unit_grouping import group_layers
from megatron_fsdp_adapter.quantized import format_of
from megatron_fsdp_adapter.rollout import unit_copies
from tests.lib.engine import schedule
from tests.lib.engine.fused_linear import FusedLinear
from tests.lib.engine.pretended import PretendCommunicator, pretended_world
from tests.lib.engine.recording import RecordingRuntime
from tests.lib.engine.side_streams import SIDE, use_side_stream
from tests.lib.engine.small_model import Loop, Net, Setup, began_with, make_net
from tests.lib.quantized.emulated import CountingParams, EmulatedLinear


@dataclass
class Rig(Loop):
    """A model on an engine. `labels` maps a storage to its buffer's name, e.g. "layers.0.weight"
    (compute weights), ".main", ".bucket", ".grad"; kept gradient buffers are ".bucket" only."""

    setup: Setup
    model: Any
    runtime: Any
    engine: FsdpEngine
    quantized: CountingParams = field(default_factory=CountingParams)
    labels: dict[int, str] = field(default_factory=dict)
    initial: dict[int, torch.Tensor] = field(default_factory=dict)
    adam: Any = None
    forwards: list[torch.Tensor] = field(default_factory=list)
    _reported: tuple[str, int] = ("", 0)

    def watch(self) -> Any:
        if isinstance(self.runtime, RecordingRuntime):
            return self.runtime.watch()
        return nullcontext()

    def mark(self, text: str) -> None:
        if isinstance(self.runtime, RecordingRuntime):
            self.runtime.mark(text)

    def initial_part(self, view: torch.Tensor) -> torch.Tensor:
        """What `view`, the output of a gather, held at the beginning; zeros for that of an export,
        which is made for it."""
        found = self.initial.get(id(view))
        if found is None:
            return torch.zeros(view.shape, dtype=view.dtype)
        return found

    def report(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """A line a launch; one for the all-to-alls of a bucket's segments."""
        units = dict.fromkeys(self._unit_of(tensor) for tensor in tensors)
        line = f"{name} {' '.join(units)}"
        place = int(tensors[0].storage_offset())
        before = self._reported
        self._reported = (line, place)
        if name != "all_to_all" or line != before[0] or place <= before[1]:
            self.mark(line)

    def _unit_of(self, tensor: torch.Tensor) -> str:
        label = self.labels.get(tensor.untyped_storage()._cdata, "?")
        return label if label.endswith(".inner") else label.rsplit(".", 1)[0]

    def forward_backward(self, microbatches: int = 1) -> None:
        if self.setup.scheduled:
            schedule.forward_backward(self, microbatches)
        else:
            super().forward_backward(microbatches)

    def zero(self) -> None:
        self.engine.zero_grads()

    def finish(self) -> None:
        self.engine.finish_grads()

    def sync(self, wait: bool) -> None:
        self.engine.sync_weights(wait=wait)

    def last(self, is_last: bool) -> None:
        if self.setup.told:
            self.engine.microbatch(last=is_last)

    @torch.no_grad()
    def optimizer_step(self) -> None:
        if self.adam is not None:
            self.adam.step()
        else:
            self.engine.gather.begin_step()
            for pair in self.engine.pairs:
                if pair.grad is not None:
                    pair.sharded._local_tensor.sub_(pair.grad._local_tensor, alpha=0.1)
        self.engine.main_weights_changed(stepped=self.adam is not None)

    def adopt_adam(self) -> None:
        """AdamW on local shards, which are streamed from host memory with `offload`."""
        for pair in self.engine.pairs:
            mark_shard(pair)
        trained = [pair.sharded for pair in self.engine.pairs if pair.grad is not None]
        self.adam = torch.optim.AdamW(trained, lr=0.1)
        begin = self.engine.gather.begin_step
        residency = Residency([self.engine], self.adam)
        adopt(self.adam, lambda unused: begin(), residency=residency)

    @torch.no_grad()
    def write(self) -> None:
        self.engine.to_sharded()
        for pair in self.engine.pairs:
            pair.sharded._local_tensor.mul_(0.5)  # type: ignore[attr-defined]

    def load(self) -> None:
        self.write()
        self.engine.main_weights_changed(loaded=True)

    def export(self, dtype: torch.dtype | None, units: int | None = None) -> None:
        """Reads every tensor of the first units, or of all, and keeps none."""
        wanted = unit_copies.Wanted(lambda group: True, dtype, self.setup.recipe is not None)
        copies = unit_copies.unit_copies(self.engine, wanted)
        for unit in itertools.islice(copies, units):
            while unit:
                _, planes = unit.pop()
                while planes:
                    planes.popitem()[1].sum()
        copies.close()

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's rows of the main weights, by first name, copied."""
        self.engine.to_sharded()
        return {
            pair.managed.fqns[0]: pair.sharded._local_tensor.detach().clone()  # type: ignore[attr-defined]
            for pair in self.engine.pairs
        }

    def allocated(self) -> set[str]:
        """Names of the buffers that have storage."""
        return {name for name, flat in buffers_of(self.engine) if storage_bytes(flat) > 0}


def buffers_of(engine: FsdpEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """Every flat buffer with a name; one per storage."""
    for unit in engine.units:
        for number, group in enumerate(unit.groups):
            name = unit.name + (f"#{number}" if number else "")
            for full, shard in zip(group.weights.unsharded, group.weights.sharded, strict=True):
                label = f"{name}.{full.plane.name}"
                yield label, full.tensor
                if shard is not full:
                    yield label.replace(".weight", "") + ".inner", shard.tensor
            if not group.main.is_compute_weight:
                yield f"{name}.main", group.main.buffer.tensor
            if group.key.requires_grad:
                yield f"{name}.bucket", group.grads.bucket.tensor
                if group.grads.main is not group.grads.bucket:
                    yield f"{name}.grad", group.grads.main.tensor


def streamed_buffers(rig: Rig) -> Iterator[tuple[str, torch.Tensor]]:
    """What a streamed optimizer has on the device of each unit, in turn."""
    shards = getattr(rig.adam, "_fsdp_shards", None)
    for part in () if shards is None else shards.residency.parts:
        for number, buffer in enumerate(part.buffers):
            yield f"{part.unit.name}.streamed{number}", buffer.tensor


def initial_outputs(
    engine: FsdpEngine, began: dict[str, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """What the output of each gather held at the beginning, from full parameters by name (their
    planes, by name of the parameter and of the plane). By the view itself: in slots, units share
    storage."""
    for group in engine.groups:
        for buffer, shard in zip(group.weights.unsharded, group.weights.sharded, strict=True):
            full = torch.zeros(buffer.tensor.shape, dtype=buffer.tensor.dtype)
            for index, managed in enumerate(group.managed):
                extent = buffer.plane.range(group.layout.item_range(index))
                name = managed.fqns[0] + (f":{buffer.plane.name}" if group.key.quantized else "")
                full[extent.start : extent.stop] = began[name].reshape(-1)
            inner = full if shard is buffer else shard.tensor.clone()
            for output in shard.segments(group.shards.inner):
                yield id(output), _part(inner, output, shard.tensor)
            for output in buffer.segments(group.shards.full):
                yield id(output), _part(full, output, buffer.tensor)


def _part(content: torch.Tensor, view: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    start = int(view.storage_offset() - buffer.storage_offset())
    return content[start : start + view.numel()]


def units_of(model: Net) -> dict[str, nn.Module]:
    units: dict[str, nn.Module] = {}
    if not model.setup.tied:
        units["embedding"] = model.embedding
    for number, layer in enumerate(model.layers):
        units[f"layers.{number}"] = layer
    if not model.setup.tied:
        units["head"] = model.head
    return units


def _mine(setup: Setup, lists: Sequence[Sequence[int]]) -> Any:
    """Makes a group of each list of ranks; returns the one that this rank is in."""
    mine = None
    for ranks in lists:
        group = dist.new_group(list(ranks))
        if mine is None and setup.rank in ranks:
            mine = group
    assert mine is not None
    return mine


def domains_of(setup: Setup) -> dict[str, Any]:
    inner = setup.world // setup.outer
    instances = [range(start, start + inner) for start in range(0, setup.world, inner)]
    shards = dist.group.WORLD
    across = None
    halves = None
    if setup.outer > 1:
        shards = _mine(setup, instances)
    of_split = setup.split_outer or setup.outer
    if setup.split:
        whole = setup.world // of_split
        of_two = []
        for first in range(0, setup.world, whole):
            ranks = range(first, first + whole)
            of_two += [ranks[start::2] for start in range(2)]
        halves = _mine(setup, [ranks for ranks in of_two if ranks])
    if setup.outer > 1:
        across = _mine(setup, [range(start, setup.world, inner) for start in range(inner)])
    of_halves = across
    if of_split != setup.outer:
        whole = setup.world // of_split
        ways = [range(start, setup.world, whole) for start in range(whole)]
        of_halves = _mine(setup, ways) if of_split > 1 else None
    index = FSDPDistributedIndex(
        shards,
        device_type="cpu",
        grad_scale=setup.grad_scale or 1.0 / setup.world,
        expt_fsdp_group=halves,
        outer_fsdp_group=across,
        expt_outer_fsdp_group=of_halves,
        hsdp_outer_dp_shard=setup.shard_outer,
        expt_hsdp_outer_dp_shard=setup.splits_again_apart,
    )
    return dict(index.domains)


def writer_of(setup: Setup, managed: ManagedParam) -> WgradProtocol:
    kinds = (FusedLinear, EmulatedLinear)
    fused = isinstance(managed.slots[0][0], kinds) and managed.param.ndim == 2
    if not (fused and setup.fused):
        return WgradProtocol.AUTOGRAD
    managed.param.asks_early = setup.fused is WgradProtocol.OVERWRITES_EARLY  # type: ignore[attr-defined]
    return setup.fused


def build(
    setup: Setup,
    runtime: Any = None,
    communicator: Callable[..., Any] = PretendCommunicator,
) -> Rig:
    """Inside a `pretended_world` of the setup's size. The runtime is a new recording one unless
    given; what is built, is built under its watch."""
    if runtime is None:
        runtime = RecordingRuntime(SIDE)
    model = make_net(setup)
    if setup.side is not None:
        use_side_stream(model.layers, runtime, setup.side, setup.forgets)
    began = began_with(model)
    rig = Rig(setup, model, runtime, None)  # type: ignore[arg-type]

    units = {} if setup.one_unit else units_of(model)
    entries = []
    for entry in managed_params(model, units):
        is_expert = setup.split and ".down." in entry.fqns[0]
        entry = replace(
            entry,
            domain=EXPERT if is_expert else DENSE,
            writer=writer_of(setup, entry),
            format=format_of(entry),
        )
        entries.append(entry)
    forward_only = [name for name, unit in units.items() if isinstance(unit, nn.Embedding)]
    plans = partition(units, entries, forward_only)
    plans = group_layers(plans, setup.joined)
    if setup.own:
        turn = itertools.cycle(setup.own)
        plans = [replace(plan, strategy=STRATEGIES[next(turn)]) for plan in plans]
    domains = domains_of(setup)
    if setup.whole:
        config = with_single_rank_domains(setup.config, domains)
    else:
        config = setup.config
    with rig.watch():
        rig.engine = FsdpEngine(
            model,
            plans,
            domains,
            config,
            runtime,
            lambda group, device: communicator(group, rig.initial_part, rig.report),
            None if setup.check_by is None else GradCheck(setup.check_by == "parameter"),
            quantized=rig.quantized,
        )
        if setup.adam:
            rig.adopt_adam()
    for unit, name in zip(rig.engine.units, itertools.cycle(setup.found or ()), strict=False):
        unit.keep(STRATEGIES[name])
    if 0 < setup.kept_over < setup.world:
        first = setup.rank - setup.rank % setup.kept_over
        fewer = _mine(setup, [range(first, first + setup.kept_over)])
        for unit in rig.engine.units:
            among = {DENSE: communicator(fewer, rig.initial_part, rig.report)}
            unit.parts = KeptParts(unit.groups, among, runtime)
    rig.initial = dict(initial_outputs(rig.engine, began))
    for label, flat in (*buffers_of(rig.engine), *streamed_buffers(rig)):
        rig.labels[flat.untyped_storage()._cdata] = label
        if isinstance(runtime, RecordingRuntime):
            runtime.label(flat, label)
    for layer in model.layers:
        layer.mark = rig.mark
    return rig


@contextmanager
def built(
    setup: Setup, runtime: Any = None, communicator: Callable[..., Any] = PretendCommunicator
) -> Iterator[Rig]:
    """What `build` makes, inside a world of the setup's size."""
    with pretended_world(setup.world, setup.rank):
        yield build(setup, runtime, communicator)


def profiled_pass(setup: Setup, profile: Callable[[Any, str, Any], None]) -> None:
    """Two microbatches under `sys.setprofile(profile)`, of a step that knows the order of units."""
    with built(setup, HostRuntime()) as rig:
        for _ in range(2):
            rig.step()
        rig.zero()
        gc.disable()  # an earlier test's engine may be collected, whose finalizer would be counted
        sys.setprofile(profile)
        try:
            rig.forward_backward(2)
        finally:
            sys.setprofile(None)
            gc.enable()
