"""Models of Megatron whose weights are in Transformer Engine's classes, in what the wrapper decides
by itself: recomputation, tied and frozen weights, adapters, layers that stay as they are, experts,
tensor parallelism, fused gradients.

The reference is stock DDP over whole float32 weights, which computes with what TE's function makes
of them before each step. Everything is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from megatron_fsdp_adapter.prove.gather_full import full_values
from tests.distributed.checks import check_same_bits
from tests.distributed.gpt import Case
from tests.distributed.topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    init_topology,
    local_of,
    run_schedule,
)
from tests.quantized.te_extension import FOLDERS, WITHOUT, Extension, run_te
from tests.quantized.te_weights import quantizer, te_parameter, te_whole

pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)

CASE = Case(
    num_layers=3, hidden=32, heads=2, ffn=48, vocab=54, seq=8, microbatches=1, clip=0.0, lr=3e-3
)
DATA, EXPERTS = Topology("dp2"), Topology("ep2", ep=2, experts=4)
Change = Callable[[nn.Module], None]


def _nothing(model: nn.Module) -> None:
    pass


def recomputes(**options: Any) -> Change:
    def change(model: Any) -> None:
        for module in model.modules():
            if options.get("recompute_modules") and hasattr(module, "recompute_mlp"):
                module.recompute_mlp = True
        for name, value in options.items():
            setattr(model.config, name, value)

    return change


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, in the place of the layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        rows, columns = layer.weight.shape
        generator = torch.Generator().manual_seed(rows)
        self.to_wrap = layer
        self.down = nn.Parameter(torch.randn(4, columns, generator=generator) * 0.1)
        self.up = nn.Parameter(torch.randn(rows, 4, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> Any:
        output, bias = self.to_wrap(x)
        return output + x @ self.down.t() @ self.up.t(), bias


def adapts(model: nn.Module) -> None:
    """Everything frozen but the adapters, as when a model is tuned over a quantized base."""
    for param in model.parameters():
        param.requires_grad_(False)
    for layer in model.decoder.layers:  # type: ignore[union-attr]
        layer.mlp.linear_fc1 = Adapted(layer.mlp.linear_fc1)
        layer.mlp.linear_fc2 = Adapted(layer.mlp.linear_fc2)


def in_layers(name: str) -> bool:
    return "decoder" in name and ".linear_" in name and name.endswith("weight")


@dataclass(frozen=True)
class Cell:
    """change: the bare model; chosen: names of quantized weights; count: how many a rank has."""

    count: int
    recipe: str = "blockwise"
    topology: Topology = DATA
    case: dict[str, Any] = field(default_factory=dict)
    change: Change = _nothing
    chosen: Callable[[str], bool] = in_layers
    strategies: tuple[str, ...] = ("optim_grads_params",)


FULL = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1
}  # fmt: skip
CELLS = {
    "tied": Cell(12, case={"tied": True}, strategies=("optim", "optim_grads_params")),
    "full recompute": Cell(12, change=recomputes(**FULL)),
    "MXFP8": Cell(12, "mxfp8", case={"ffn": 64}, strategies=("optim", "optim_grads_params")),
    "recomputed mlp": Cell(
        # With biases core's checkpoint of an MLP does not end, under any wrapper.
        12, case={"bias": False},
        change=recomputes(recompute_granularity="selective", recompute_modules=["mlp"]),
    ),
    "first and last layer as they are": Cell(
        4, chosen=lambda name: in_layers(name) and ".layers.1." in name
    ),
    "adapters over a frozen base": Cell(12, change=adapts),
    "experts": Cell(
        # Of three layers the second has experts, two on each rank.
        2 * 4 + 2 + 2 * 2, "current", EXPERTS, {"bias": False},
    ),
    "fused gradients": Cell(
        12, "current", case={"fused": True}, strategies=("no_shard", "optim_grads_params")
    ),
}  # fmt: skip
SPLIT = "tensor and sequence parallelism"
TENSOR_PARALLEL = Cell(
    12, "current", Topology("tp2-sp", tp=2, sp=True), {"hidden": 64, "ffn": 96},
    strategies=("no_shard", "optim_grads_params"),
)  # fmt: skip


@contextmanager
def fusing(wanted: bool) -> Iterator[None]:
    """Megatron's layers can be told to fuse; core's own config has no say over these models."""
    if wanted:
        patches.install(FUSED_WGRAD)
    try:
        yield
    finally:
        if wanted:
            patches.uninstall(FUSED_WGRAD)


def fuse(model: nn.Module) -> None:
    model.config.gradient_accumulation_fusion = True  # type: ignore[union-attr]
    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = True


class Reference:
    """Stock DDP that computes with quantized weights."""

    def __init__(self, cell: Cell, case: Case) -> None:
        self.trainer = build_topology_trainer(cell.topology, case, None, cell.change)
        self.recipe = cell.recipe
        named = {name.partition(".")[2]: param for name, param in self._named()}
        self.params = {name: param for name, param in named.items() if cell.chosen(name)}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.trainer._named(lambda chunk: chunk)

    def step(self, number: int) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Loss, gradients and weights; what it computed with is gone."""
        mains = {name: param.detach().clone() for name, param in self.params.items()}
        for name, param in self.params.items():
            whole = te_whole(self.recipe, mains[name], mains[name].dtype)
            param.data.copy_(Extension.dequantize(whole, None))
        loss = run_schedule(self.trainer, number)
        trained = {n for n, p in self._named() if p.requires_grad}
        grads = {
            n: p.main_grad.detach().clone()  # type: ignore[attr-defined]
            for n, p in self._named() if n in trained
        }  # fmt: skip
        for name, param in self.params.items():
            param.data.copy_(mains[name])
        self.trainer.optimizer.step()
        weights = {n: p.detach().clone() for n, p in self._named() if n in trained}
        return loss, grads, weights


def quantizing(cell: Cell) -> Change:
    def change(model: nn.Module) -> None:
        cell.change(model)
        names = [name for name, _ in model.named_parameters() if cell.chosen(name)]
        assert len(names) == cell.count, names
        for name in names:
            owner = model.get_submodule(name.rpartition(".")[0])
            own = name.rpartition(".")[2]
            param = owner._parameters[own]
            assert param is not None
            wants = quantizer(cell.recipe, torch.tensor([100.0, 0.0]))
            made = te_parameter(param, wants)
            owner._parameters[own] = made.requires_grad_(param.requires_grad)

    return change


def our_step(trainer: TopologyTrainer, number: int) -> tuple[float, Any, Any]:
    loss = run_schedule(trainer, number)
    trained = [(n, p) for n, p in trainer._pairs() if p.sharded.requires_grad]
    grads = full_values(trained, lambda pair: local_of(pair.sharded.grad))
    trainer.optimizer.step()
    return loss, grads, full_values(trained, lambda pair: local_of(pair.sharded))


def _train(rank: int, world: int, names: list[str]) -> None:
    for name in names:
        _compare({**CELLS, SPLIT: TENSOR_PARALLEL}[name], name)


def _compare(cell: Cell, name: str) -> None:
    init_topology(cell.topology)
    changes = dict(cell.case)
    is_fused = changes.pop("fused", False)
    case = CASE.but(**changes)
    with fusing(is_fused):
        reference = Reference(cell, case)
        change = quantizing(cell)

        def prepared(model: nn.Module) -> None:
            change(model)
            if is_fused:
                fuse(model)

        ours = {
            strategy: build_topology_trainer(cell.topology, case, strategy, prepared)
            for strategy in cell.strategies
        }
        for number in range(3):
            loss, grads, weights = reference.step(number)
            for strategy, trainer in ours.items():
                label = f"{name}, {strategy}, step {number}"
                found = our_step(trainer, number)
                assert found[0] == loss, f"{label}: loss {found[0]} and {loss}"
                check_same_bits(found[1], grads, label)
                check_same_bits(found[2], weights, label)
        for trainer in ours.values():
            pairs = [p for chunk in trainer.chunks for p in chunk.engine.pairs]
            writers = {p.managed.writer for p in pairs if p.group.key.quantized}
            assert (WgradProtocol.ACCUMULATES in writers) is is_fused, f"{name}: {writers}"


def test_training_is_that_of_ddp_with_weights_that_te_quantized() -> None:
    run_te(FOLDERS[0], _train, 2, list(CELLS), timeout=500)


def test_tensor_parallel_slices_have_scales_of_their_own() -> None:
    run_te(FOLDERS[0], _train, 4, [SPLIT], timeout=500)
