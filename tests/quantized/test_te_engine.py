"""Weights in Transformer Engine's own classes on the engine, over two ranks: bytes, scales and main
weights after every step are those of one process whose whole weights TE's own function quantizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.engine.partition import partition
from megatron_fsdp_adapter.core.runtime.comm import Communicator
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from megatron_fsdp_adapter.core.topology import DENSE
from megatron_fsdp_adapter.quantized import TransformerEngineParams, format_of
from tests.distributed.launch import run_ranks
from tests.engine.engine_cases import Setup, domains_of
from tests.quantized.te_checks import own_group, same
from tests.quantized.te_extension import FOLDERS, RELEASES, standing_in
from tests.quantized.te_values import columns_of, derived, rows_of
from tests.quantized.te_weights import RECIPES, quantizer, te_quantize

CPU = torch.device("cpu")
HIDDEN, INNER, LAYERS, STEPS = 64, 192, 2, 3
RATE = 3.0
"""So that every step changes scales."""
KNOWS = TransformerEngineParams()

pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
)


class Linear(torch.autograd.Function):
    """Asks for usages and reads fields as TE's layers on Hopper do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        wants = weight._quantizer
        rows, columns = wants.rowwise_usage or None, wants.columnwise_usage or None
        weight.update_usage(rowwise_usage=rows, columnwise_usage=columns)
        assert derived(weight) is None, "made in forward"
        ctx.save_for_backward(x, weight)
        return x @ rows_of(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight.update_usage(columnwise_usage=True)
        return grad @ columns_of(weight), grad.t() @ x


class Layer(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.bfloat16)
        self.up = made(recipe, (INNER, HIDDEN))
        self.down = made(recipe, (HIDDEN, INNER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = Linear.apply(self.norm(x), self.up).relu()
        return x + Linear.apply(inner, self.down)  # type: ignore[no-any-return]


def made(recipe: str, shape: tuple[int, int]) -> Any:
    """A parameter as TE makes it, with the value it was made from."""
    value = torch.randn(shape).bfloat16() * 0.2
    wants = quantizer(recipe, torch.tensor([60.0, 0.0]))
    param: Any = nn.Parameter(wants.make_empty(shape, dtype=torch.bfloat16, device="cpu"))
    te_quantize([param], [value.view(-1)], [0], ALONE[0])
    param._high_precision_init_val = value
    return param


ALONE: list[Any] = []
"""A group of this rank alone, for TE's function."""


def roll(params: list[Any]) -> None:
    """TE's update at the end of a forward, with delayed scaling."""
    for param in params:
        wants = getattr(param, "_quantizer", None)
        if type(wants).__name__ == "Float8Quantizer" and wants.amax.item() > 0:
            wants.scale.copy_(torch.tensor(448.0) / wants.amax * 0.9)
            wants.amax.zero_()


class Net(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, wanted = torch.randn(2, 16, HIDDEN, generator=generator).bfloat16()
    # Of a norm's output the mean square is the same whatever the weights are.
    return (model(x) - wanted).float().pow(2).mean() * (rank + 1)  # type: ignore[no-any-return]


class Whole:
    """The same training in one process: gradients of all ranks, TE's function over whole mains."""

    def __init__(self, recipe: str, world: int) -> None:
        self.model, self.world = Net(recipe), world
        self.params: dict[str, Any] = dict(self.model.named_parameters())
        self.mains = {
            name: getattr(param, "_high_precision_init_val", param).detach().float()
            for name, param in self.params.items()
        }
        self.quantized = [n for n in self.params if hasattr(self.params[n], "_quantizer")]
        for name in self.quantized:
            KNOWS.high_precision(self.params[name])

    def step(self, step: int) -> None:
        totals = {name: torch.zeros_like(main) for name, main in self.mains.items()}
        for rank in range(self.world):
            for name in self.quantized:
                KNOWS.drop_derived(self.params[name])
                KNOWS.prepare(self.params[name])
            loss = loss_of(self.model, step, rank)
            loss.backward()
            for name, param in self.params.items():
                totals[name] += param.grad.float()
                param.grad = None
        roll(list(self.params.values()))
        with torch.no_grad():
            for name, main in self.mains.items():
                main.sub_(totals[name] / self.world, alpha=RATE)
                if name not in self.quantized:
                    self.params[name].copy_(main)
            te_quantize(
                [self.params[name] for name in self.quantized],
                [self.mains[name].view(-1) for name in self.quantized],
                [0] * len(self.quantized), ALONE[0],
            )  # fmt: skip


def sharded(recipe: str, strategy: str, rank: int, world: int) -> FsdpEngine:
    setup, model = Setup(strategy, world, rank), Net(recipe)
    plans = partition(
        model, {f"layers.{i}": layer for i, layer in enumerate(model.layers)},
        domain_of=lambda param, fqn: DENSE, format_of=format_of,
    )  # fmt: skip
    engine = FsdpEngine(
        model, plans, domains_of(setup), setup.config, HostRuntime(),
        lambda group, device: Communicator(group, CPU), quantized=KNOWS,
    )
    engine.model = model  # type: ignore[attr-defined]
    return engine


@torch.no_grad()
def optimizer_step(engine: FsdpEngine) -> None:
    for pair in engine.pairs:
        pair.sharded._local_tensor.sub_(pair.grad._local_tensor, alpha=RATE)  # type: ignore
    engine.main_weights_changed()


def compare(engine: FsdpEngine, whole: Whole, label: str) -> None:
    engine.to_sharded()
    for pair in engine.pairs:
        name, held = pair.managed.fqns[0], pair.group.held
        rows = held.layout.shard_range(pair.index, held.rank)
        local = pair.sharded._local_tensor.detach()  # type: ignore[attr-defined]
        same(local, whole.mains[name].view(-1)[rows.start : rows.stop], f"{label}, main of {name}")
    engine.to_unsharded()
    for unit in engine.units:
        engine.gather.need(unit)
        for group in unit.groups:
            for entry in group.managed if group.key.quantized else ():
                name, other = entry.fqns[0], whole.params[entry.fqns[0]]
                mine, theirs = KNOWS.fields(entry.param), KNOWS.fields(other)
                for plane in mine:
                    same(mine[plane], theirs[plane], f"{label}, {plane} of {name}")
                for one, two in zip(KNOWS.scales(entry.param), KNOWS.scales(other), strict=True):
                    same(one, two, f"{label}, scales of {name}")
        engine.gather.release(unit)


def scales_of(whole: Whole) -> list[torch.Tensor]:
    """Of every weight one tensor, by which a step that did not make scales anew is seen."""
    params = [whole.params[name] for name in whole.quantized]
    return [(KNOWS.scales(p) or [p._rowwise_scale_inv])[0].clone() for p in params]


def _train(rank: int, world: int, folder: str, strategy: str) -> None:
    with standing_in(Path(folder)):
        ALONE[:] = [own_group(rank, world)]
        for recipe in RECIPES:
            whole, engine = Whole(recipe, world), sharded(recipe, strategy, rank, world)
            model, label = engine.model, f"{recipe}, {strategy}"  # type: ignore[attr-defined]
            compare(engine, whole, f"{label}, made")
            for step in range(STEPS):
                before = scales_of(whole)
                engine.zero_grads()
                loss_of(model, step, rank).backward()
                roll([param for unit in engine.units for param in unit.quantized])
                engine.finish_grads()
                optimizer_step(engine)
                engine.sync_weights(wait=False)
                whole.step(step)
                compare(engine, whole, f"{label}, step {step}")
                after = scales_of(whole)
                changed = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
                # Powers of two of whole blocks change rarely.
                assert recipe == "blockwise" or any(changed), f"{label}, step {step}: {changed}"
            engine.finish_grads()
        dist.barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("folder", RELEASES)
def test_two_ranks_train_as_one_process_that_te_quantizes(folder: Path, strategy: str) -> None:
    run_ranks(_train, 2, str(folder), strategy)
