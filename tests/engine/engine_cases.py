"""A small model on the whole engine in one process: N pretended shards, collectives that write
what real ones would, and a runtime that checks every access.

`Rig` is the model with its engine; `Rig.step` is a training step as Megatron takes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_adapter.comm.all_to_all_sum import ALL_TO_ALL_SUM, FIXED_ALL_TO_ALL_SUM
from megatron_fsdp_adapter.core.config import (
    STRATEGIES,
    EngineConfig,
    MixedPrecisionPolicy,
    poison_asked,
)
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.engine.partition import ManagedParam, partition
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.runtime.comm import REDUCE_SCATTER, Reduce
from megatron_fsdp_adapter.core.runtime.device import storage_bytes
from megatron_fsdp_adapter.core.topology import DENSE, EXPERT
from megatron_fsdp_adapter.diagnostics.grad_check import GradCheck
from megatron_fsdp_adapter.optim.residency import Residency
from megatron_fsdp_adapter.optim.step import adopt
from megatron_fsdp_adapter.quantized import format_of
from megatron_fsdp_adapter.sharding import unit_copies
from megatron_fsdp_adapter.sharding.building import with_single_rank_domains
from megatron_fsdp_adapter.sharding.distributed_index import FSDPDistributedIndex
from megatron_fsdp_adapter.sharding.sharded_module import mark_shard
from megatron_fsdp_adapter.sharding.unit_grouping import group_layers
from tests.engine import schedule
from tests.engine.fused_linear import FusedLinear, Operation
from tests.engine.pretended import PretendCommunicator
from tests.engine.recording import RecordingRuntime
from tests.engine.side_streams import SIDE, use_side_stream
from tests.quantized.emulated import CountingParams, EmulatedLinear, quantize_linears

HIDDEN, VOCAB, BATCH, SEQ = 6, 11, 2, 5


def microbatch(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)


@dataclass(frozen=True)
class Setup:
    """A model, a world and a strategy. `recompute` is None, "reentrant", "non_reentrant" or
    "selective"; `width` is the number of extra parameters of each layer. `split` shards the
    `down` maps over a domain of their own, of every second rank. `outer` instances of the model
    share `world` ranks out among them, and hold the same shards or, with `shard_outer`, parts.
    `check_by` looks for gradients that are not finite by "unit" or "parameter". `fused` lets the
    layers' maps write their weight gradients by themselves: a `WgradProtocol` that does;
    `operations`: others, which no module tree has, hold their parameters and are called. `slots`:
    transient buffers are in fixed memory. `joined`: elements up to which layers are joined to a
    unit. `own`: strategies that units have in turn, in place of the model's; `found`: those that
    they take on when the engine has been made. `whole`: what is of a
    domain of one rank is kept whole. `recipe`: how the layers' maps are quantized, none of them by
    default. `one_unit`: all parameters are the root's.

    Of the loop: with `told` it says which microbatch is the last; `scheduled`: a schedule takes
    passes apart (`schedule.py`); `side`: layers use a stream of their own (`side_streams.py`) and
    wait for it, but where it `forgets` to; `adam`: steps are those of AdamW, else of SGD.
    `poison`: as the environment says unless given. `grad_scale`: that of a mean unless given."""

    strategy: str = "optim_grads_params"
    world: int = 2
    rank: int = 0
    layers: int = 4
    dtype: torch.dtype = torch.bfloat16
    tied: bool = False
    frozen: bool = False
    recompute: str | None = None
    width: int = 0
    overlap: bool = True
    prefetch_bytes: int = 0
    comm_dtype: torch.dtype | None = None
    root_norm: bool = True
    split: bool = False
    outer: int = 1
    shard_outer: bool = False
    check_by: str | None = None
    fused: WgradProtocol | None = None
    operations: bool = False
    slots: bool = False
    exchange: bool = False
    main_params: torch.dtype | None = torch.float32
    main_grads: torch.dtype | None = None
    fp32_sums: bool = False
    scale_before_sum: bool = False
    grad_scale: float | None = None
    recipe: str | None = None
    keep_derived: bool = False
    offload: bool = False
    own: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    whole: bool = False
    joined: int = 0
    one_unit: bool = False
    told: bool = True
    scheduled: bool = False
    side: str | None = None
    forgets: str = ""
    adam: bool = False
    poison: bool | None = None

    @property
    def hidden(self) -> int:
        """Width of the layers: formats want whole blocks."""
        return HIDDEN if self.recipe is None else 32

    @property
    def inner(self) -> int:
        return 7 if self.recipe is None else 96

    def but(self, **changes: Any) -> Setup:
        return replace(self, **changes)

    @property
    def reduce_scatter(self) -> Reduce:
        if self.exchange:
            return FIXED_ALL_TO_ALL_SUM
        return ALL_TO_ALL_SUM if self.fp32_sums else REDUCE_SCATTER

    @property
    def config(self) -> EngineConfig:
        row = STRATEGIES[self.strategy]
        return EngineConfig(
            row,
            MixedPrecisionPolicy(self.main_params, self.main_grads, self.comm_dtype),
            overlap_grad_reduce=self.overlap or row.shard_grads,
            overlap_param_gather=self.overlap or row.shard_weights,
            prefetch_bytes=self.prefetch_bytes,
            shard_outer=self.shard_outer,
            weight_slots=self.slots,
            bucket_slots=self.slots,
            reduce_scatter=self.reduce_scatter,
            scale_before_sum=self.scale_before_sum,
            keep_derived=self.keep_derived,
            offload=self.offload,
            poison_buffers=poison_asked() if self.poison is None else self.poison,
        )


class Marked(torch.autograd.Function):
    """The identity; tells when forward passes here, and when backward comes back."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mark: Callable[[str], None], name: str) -> Any:
        mark(f"forward {name}")
        ctx.mark, ctx.name = mark, name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.mark(f"backward {ctx.name}")
        return grad, None, None


class Layer(nn.Module):
    """Two linear maps around a GELU, a norm, and `width` scales. `marker` wraps what happens.
    `caches`: something made of the norm's weight is kept from one forward to the next, as autocast
    keeps casts."""

    def __init__(self, name: str, setup: Setup) -> None:
        super().__init__()
        self.label, self.setup = name, setup
        linear = nn.Linear if setup.fused is None else FusedLinear
        hidden = setup.hidden
        self.up = linear(hidden, setup.inner)
        self.down = linear(setup.inner, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(hidden)) for _ in range(setup.width))
        self.mark: Callable[[str], None] = lambda text: None
        self.caches, self.cached = False, None
        self.maps: tuple[nn.Module, ...] = ()

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        if not self.maps:
            maps = (self.up, self.down)
            self.maps = tuple(map(Operation, maps)) if self.setup.operations else maps
        up, down = self.maps
        return down(torch.nn.functional.gelu(up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Marked.apply(x, self.mark, self.label)
        h = self.norm(x)
        if self.setup.recompute == "selective":
            h = checkpoint(self._inner, h, use_reentrant=False)
        else:
            h = self._inner(h)
        for scale in self.scales:
            h = h * scale
        if self.caches:
            self.cached = self.norm.weight + 0.0 if self.cached is None else self.cached
            h = h * self.cached
        return x + h


class Net(nn.Module):
    """Embedding, layers, a norm of its own (the root's), output layer. `path` is the order in
    which layers run; `unused` gets no gradient unless the model is given it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        hidden = setup.hidden
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.layers = nn.ModuleList(Layer(f"layers.{i}", setup) for i in range(setup.layers))
        self.norm = nn.LayerNorm(hidden) if setup.root_norm else nn.Identity()
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        if setup.tied:
            self.head.weight = self.embedding.weight
        if setup.frozen:
            self.layers[1].up.requires_grad_(False)
            self.layers[2].requires_grad_(False)
        self.path = list(range(setup.layers))
        self.explode: str | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.path:
            if self.explode == f"forward {index}":
                raise Exploded(self.explode)
            x = self._run(self.layers[index], x)
            if self.explode == f"backward {index}" and x.requires_grad:
                x.register_hook(_explode)
        return self.head(self.norm(x))

    def _run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kind = self.setup.recompute
        if kind in ("reentrant", "non_reentrant") and torch.is_grad_enabled():
            return checkpoint(layer, x, use_reentrant=kind == "reentrant")
        return layer(x)


class Exploded(Exception):
    """What a model raises here on purpose."""


def _explode(grad: torch.Tensor) -> None:
    raise Exploded("backward")


def make_net(setup: Setup) -> Net:
    """The same values every time."""
    torch.manual_seed(0)
    model = Net(setup).to(setup.dtype)
    if setup.recipe is not None:
        quantize_linears(model.layers, setup.recipe)
        if setup.tied:
            model.layers[-1].up.weight = model.layers[0].up.weight
    return model


def began_with(model: Net) -> dict[str, torch.Tensor]:
    """Values of parameters, or of the planes of quantized ones, copied, by name."""
    found = {}
    for name, param in model.named_parameters():
        if hasattr(param, "_quantizer"):
            fields = CountingParams().fields(param)
            found |= {f"{name}:{plane}": value.clone() for plane, value in fields.items()}
        else:
            found[name] = param.detach().clone()
    return found


class Loop:
    """What a training loop does with a model. Without an engine: this, under autograd alone."""

    setup: Setup
    model: Net

    def tokens(self, index: int) -> torch.Tensor:
        return microbatch(index)

    def loss(self, index: int = 0) -> torch.Tensor:
        return self.model(self.tokens(index)).float().square().mean()

    def forward_backward(self, microbatches: int = 1) -> None:
        for index in range(microbatches):
            self.last(index == microbatches - 1)
            self.loss(index).backward()

    def evaluate(self) -> torch.Tensor:
        with torch.no_grad():
            return self.loss(77)

    def step(self, microbatches: int = 1, sync: bool = True) -> None:
        """zero, forwards and backwards, finish, step and, as Megatron does, a sync."""
        self.zero()
        self.forward_backward(microbatches)
        self.finish()
        self.optimizer_step()
        if sync:
            self.sync(wait=False)

    def zero(self) -> None:
        self.model.zero_grad()

    def finish(self) -> None:
        """Gradients are where they are."""

    def sync(self, wait: bool) -> None:
        """There is one copy of the weights."""

    def last(self, is_last: bool) -> None:
        """Gradients always accumulate."""

    def export(self, dtype: torch.dtype | None, units: int | None = None) -> None:
        """Weights are whole."""

    @torch.no_grad()
    def optimizer_step(self) -> None:
        for param in self.model.parameters():
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)

    @torch.no_grad()
    def write(self) -> None:
        """Makes the main weights half of what they are."""
        for param in self.model.parameters():
            param.mul_(0.5)

    def load(self) -> None:
        """The same, as a load does."""
        self.write()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class PlainRig(Loop):
    """A model under autograd alone."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.model = setup, make_net(setup)


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
    _reported: tuple[str, int] = ("", 0)

    def watch(self) -> Any:
        return self.runtime.watch() if isinstance(self.runtime, RecordingRuntime) else nullcontext()

    def mark(self, text: str) -> None:
        if isinstance(self.runtime, RecordingRuntime):
            self.runtime.mark(text)

    def initial_part(self, view: torch.Tensor) -> torch.Tensor:
        """What `view`, the output of a gather, held at the beginning; zeros for that of an export,
        which is made for it."""
        found = self.initial.get(id(view))
        return torch.zeros(view.shape, dtype=view.dtype) if found is None else found

    def report(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """A line a launch; one for the all-to-alls of a bucket's segments."""
        units = dict.fromkeys(self._unit_of(tensor) for tensor in tensors)
        line, place = f"{name} {' '.join(units)}", int(tensors[0].storage_offset())
        before, self._reported = self._reported, (line, place)
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
            self.engine.is_last_microbatch = is_last

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
            for full, shard in zip(group.weights, group.weight_shards, strict=True):
                label = f"{name}.{full.plane.name}"
                yield label, full.tensor
                if shard is not full:
                    yield label.replace(".weight", "") + ".inner", shard.tensor
            if not group.main_is_weight:
                yield f"{name}.main", group.main.tensor
            if group.key.requires_grad:
                yield f"{name}.bucket", group.bucket.tensor
                if group.grad is not group.bucket:
                    yield f"{name}.grad", group.grad.tensor


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
        for buffer, shard in zip(group.weights, group.weight_shards, strict=True):
            full = torch.zeros(buffer.tensor.shape, dtype=buffer.tensor.dtype)
            for index, managed in enumerate(group.managed):
                extent = buffer.plane.range(group.layout.item_range(index))
                name = managed.fqns[0] + (f":{buffer.plane.name}" if group.key.quantized else "")
                full[extent.start : extent.stop] = began[name].reshape(-1)
            inner = full if shard is buffer else shard.tensor.clone()
            for output in shard.segments(group.inner):
                yield id(output), _part(inner, output, shard.tensor)
            for output in buffer.segments(group.full):
                yield id(output), _part(full, output, buffer.tensor)


def _part(content: torch.Tensor, view: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    start = int(view.storage_offset() - buffer.storage_offset())
    return content[start : start + view.numel()]


def units_of(model: Net) -> dict[str, nn.Module]:
    units: dict[str, nn.Module] = {} if model.setup.tied else {"embedding": model.embedding}
    units |= {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    return units if model.setup.tied else units | {"head": model.head}


def _mine(setup: Setup, lists: Sequence[Sequence[int]]) -> Any:
    """Makes a group of each list of ranks; returns the one that this rank is in."""
    groups = [dist.new_group(list(ranks)) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists, strict=True) if setup.rank in ranks)


def domains_of(setup: Setup) -> dict[str, Any]:
    inner = setup.world // setup.outer
    instances = [range(start, start + inner) for start in range(0, setup.world, inner)]
    halves = [ranks[start::2] for ranks in instances for start in range(2) if ranks[start::2]]
    across = [range(start, setup.world, inner) for start in range(inner)]
    index = FSDPDistributedIndex(
        _mine(setup, instances) if setup.outer > 1 else dist.group.WORLD,
        device_type="cpu",
        grad_scale=setup.grad_scale or 1.0 / setup.world,
        expt_fsdp_group=_mine(setup, halves) if setup.split else None,
        outer_fsdp_group=_mine(setup, across) if setup.outer > 1 else None,
        hsdp_outer_dp_shard=setup.shard_outer,
    )
    return dict(index.domains)


def domain_of(setup: Setup, fqn: str) -> str:
    return EXPERT if setup.split and ".down." in fqn else DENSE


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
    runtime = RecordingRuntime(SIDE) if runtime is None else runtime
    model = make_net(setup)
    if setup.side is not None:
        use_side_stream(model.layers, runtime, setup.side, setup.forgets)
    began = began_with(model)
    rig = Rig(setup, model, runtime, None)  # type: ignore[arg-type]
    plans = partition(
        model,
        {} if setup.one_unit else units_of(model),
        domain_of=lambda param, fqn: domain_of(setup, fqn),
        backward_reads_weights=lambda unit: not isinstance(unit, nn.Embedding),
        writer_of=lambda managed: writer_of(setup, managed),
        format_of=format_of,
    )
    plans = group_layers(plans, setup.joined)
    if setup.own:
        turn = itertools.cycle(setup.own)
        plans = [replace(plan, strategy=STRATEGIES[next(turn)]) for plan in plans]
    domains = domains_of(setup)
    config = with_single_rank_domains(setup.config, domains) if setup.whole else setup.config
    with rig.watch():
        rig.engine = FsdpEngine(
            model, plans, domains, config, runtime,
            lambda group, device: communicator(group, rig.initial_part, rig.report),
            None if setup.check_by is None else GradCheck(setup.check_by == "parameter"),
            quantized=rig.quantized,
        )
        if setup.adam:
            rig.adopt_adam()
    for unit, name in zip(rig.engine.units, itertools.cycle(setup.found or ()), strict=False):
        unit.keep(STRATEGIES[name])
    rig.initial = dict(initial_outputs(rig.engine, began))
    for label, flat in (*buffers_of(rig.engine), *streamed_buffers(rig)):
        rig.labels[flat.untyped_storage()._cdata] = label
        if isinstance(runtime, RecordingRuntime):
            runtime.label(flat, label)
    for layer in model.layers:
        layer.mark = rig.mark
    return rig
