"""A small model for the engine: its options, its modules, and a training loop, which without an
engine runs under autograd alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_adapter.core.comm.all_to_all_sum import ALL_TO_ALL_SUM, FIXED_ALL_TO_ALL_SUM
from megatron_fsdp_adapter.core.comm.communicator import REDUCE_SCATTER, Reduce
from megatron_fsdp_adapter.core.config import (
    STRATEGIES,
    EngineConfig,
    MixedPrecisionPolicy,
    poison_asked,
)
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.topology import EXPERT
from tests.lib.engine.fused_linear import FusedLinear, Operation
from tests.lib.quantized.emulated import CountingParams, quantize_linears

HIDDEN = 6
VOCAB = 11
BATCH = 2
SEQ = 5


def microbatch(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)


@dataclass(frozen=True)
class Setup:
    """A model, a world and a strategy. `recompute` is None, "reentrant", "non_reentrant" or
    "selective"; `width` is the number of extra parameters of each layer. `split` shards the
    `down` maps over a domain of their own, of every second rank, with the strategy
    `split_strategy` if that is given. `outer` instances of the model
    share `world` ranks out among them, and hold the same shards or, with `shard_outer`, parts; of
    the domain of their own `split_outer` and `split_shard_outer` do, if they are given.
    `check_by` looks for gradients that are not finite by "unit" or "parameter". `fused` lets the
    layers' maps write their weight gradients by themselves: a `WgradProtocol` that does;
    `operations`: others, which no module tree has, hold their parameters and are called. `slots`:
    transient buffers are in fixed memory. `joined`: elements up to which layers are joined to a
    unit. `own`: strategies that units have in turn, in place of the model's; `found`: those that
    they take on when the engine has been made. `whole`: what is of a
    domain of one rank is kept whole. `kept_over`: over so many ranks weights are kept between a
    forward and its backward. `recipe`: how the layers' maps are quantized, none of them by
    default. `one_unit`: all parameters are the root's.

    Of the loop: with `told` it says which microbatch is the last; `scheduled`: a schedule takes
    passes apart (`schedule.py`); `side`: layers use a stream of their own (`side_streams.py`) and
    wait for it, but where it `forgets` to; `adam`: steps are those of AdamW, else of SGD.
    `poison`: as the environment says unless given. `grad_scale`: that of a mean unless given.
    `as_fsdp2`: of the policy of dtypes."""

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
    split_strategy: str | None = None
    outer: int = 1
    shard_outer: bool = False
    split_outer: int | None = None
    split_shard_outer: bool | None = None
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
    kept_over: int = 0
    joined: int = 0
    one_unit: bool = False
    told: bool = True
    scheduled: bool = False
    side: str | None = None
    forgets: str = ""
    adam: bool = False
    poison: bool | None = None
    as_fsdp2: bool = False

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
    def splits_again_apart(self) -> bool:
        """`shard_outer` of the domain of their own."""
        if self.split_shard_outer is None:
            return self.shard_outer
        return self.split_shard_outer

    @property
    def reduce_scatter(self) -> Reduce:
        if self.exchange:
            return FIXED_ALL_TO_ALL_SUM
        return ALL_TO_ALL_SUM if self.fp32_sums else REDUCE_SCATTER

    @property
    def config(self) -> EngineConfig:
        row = STRATEGIES[self.strategy]
        apart = ()
        rows = [row]
        if self.split_strategy is not None:
            rows.append(STRATEGIES[self.split_strategy])
            apart = ((EXPERT, rows[-1]),)
        return EngineConfig(
            row,
            MixedPrecisionPolicy(
                self.main_params, self.main_grads, self.comm_dtype, as_fsdp2=self.as_fsdp2
            ),
            domain_strategies=apart,
            overlap_grad_reduce=self.overlap or any(one.shard_grads for one in rows),
            overlap_param_gather=self.overlap or any(one.shard_weights for one in rows),
            prefetch_bytes=self.prefetch_bytes,
            shard_outer=self.shard_outer,
            domain_shard_outer=((EXPERT, self.splits_again_apart),) if self.split else (),
            weight_slots=self.slots,
            bucket_slots=self.slots,
            reduce_scatter=self.reduce_scatter,
            scale_before_sum=self.scale_before_sum,
            keep_derived=self.keep_derived,
            offload=self.offload,
            poison_buffers=poison_asked() if self.poison is None else self.poison,
        )


class Layer(nn.Module):
    """Two linear maps around a GELU, a norm, and `width` scales. `marker` wraps what happens.
    `caches`: something made of the norm's weight is kept from one forward to the next, as autocast
    keeps casts."""

    def __init__(self, name: str, setup: Setup) -> None:
        super().__init__()
        self.label = name
        self.setup = setup
        linear = nn.Linear if setup.fused is None else FusedLinear
        hidden = setup.hidden
        self.up = linear(hidden, setup.inner)
        self.down = linear(setup.inner, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(hidden)) for _ in range(setup.width))
        self.mark: Callable[[str], None] = lambda text: None
        self.caches = False
        self.cached = None
        self.maps: tuple[nn.Module, ...] = ()

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        if not self.maps:
            maps = (self.up, self.down)
            self.maps = tuple(map(Operation, maps)) if self.setup.operations else maps
        up, down = self.maps
        return down(torch.nn.functional.gelu(up(x)))

    def _marked(self, x: torch.Tensor) -> torch.Tensor:
        """Tells when forward passes here, and when backward comes back."""
        self.mark(f"forward {self.label}")
        if x.requires_grad:
            x.register_hook(lambda grad: self.mark(f"backward {self.label}"))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._marked(x.view_as(x))
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

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = make_net(setup)
        # Losses of forwards whose backward is still to come, the oldest first.
        self.forwards: list[torch.Tensor] = []

    def forward(self, index: int) -> None:
        """Of a microbatch, whose backward may come later."""
        self.forwards.append(self.loss(index))

    def backward(self) -> None:
        """Of the oldest forward that had none."""
        self.forwards.pop(0).backward()

    def forget_forwards(self) -> None:
        """No backward of those follows."""
        self.forwards.clear()

    def loss(self, index: int = 0) -> torch.Tensor:
        return self.model(microbatch(index)).float().square().mean()

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
