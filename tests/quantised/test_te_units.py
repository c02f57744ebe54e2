"""Weights that exist by direction in Megatron's wrapper: which units gather columns alone in
backward, and that they train to the same bits as units that gather both."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.core.layout.format import Use
from megatron_fsdp_adapter.megatron import units
from megatron_fsdp_adapter.megatron.units import backward_use
from tests.distributed.gpt import Case, ddp_config, init_megatron, model_config
from tests.distributed.launch import run_ranks
from tests.quantised.te_checks import own_group, same
from tests.quantised.te_extension import FOLDERS, standing_in
from tests.quantised.te_weights import te_params
from tests.quantised.test_te_engine import Linear as Product
from tests.quantised.test_te_start import SHAPES, Layer, Linear, Model

CASE = Case(bf16=True)

pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
)


def unit_of(recipe: str, **attributes: Any) -> nn.Module:
    """A unit with one module, as TE's are if nothing else is said, and its weight."""
    owner = nn.Module()
    owner.weight = nn.Parameter(te_params(recipe, [(128, 256)], torch.ones(1, 2))[0])
    for name, value in {"param_init_meta": {}, **attributes}.items():
        if value is not None:
            setattr(owner, name, value)
    return nn.Sequential(nn.LayerNorm(8), owner)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_columns_alone_where_nothing_reads_rows_in_backward(folder: Path) -> None:
    config = SimpleNamespace
    with standing_in(folder):
        found = {
            "TE's": backward_use(config(), unit_of("mxfp8")),
            "attention": backward_use(
                config(recompute_granularity="selective", recompute_modules=["core_attn"]),
                unit_of("mxfp8"),
            ),
        }
        both = {
            "no such weights": backward_use(config(), unit_of("blockwise")),
            "other modules": backward_use(config(), unit_of("mxfp8", param_init_meta=None)),
            "TE's checkpoint": backward_use(config(), unit_of("mxfp8", checkpoint=True)),
            "full": backward_use(config(recompute_granularity="full"), unit_of("mxfp8")),
            "a part": backward_use(
                config(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"]),
                unit_of("mxfp8"),
            ),
        }
    assert set(found.values()) == {Use.BACKWARD}, found
    assert set(both.values()) == {Use.BOTH}, both


def _trained(strategy: str, group: Any, uses: list[bool]) -> list[torch.Tensor]:
    """Main weights after two steps. uses: whether rows were there, in each backward of a weight."""
    config = model_config(CASE)
    torch.manual_seed(5)
    wrapper = FullyShardedDataParallel(
        config, ddp_config(CASE, strategy), Model(config, "mxfp8", "cpu", group), [Layer]
    )
    back = Product.backward

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        uses.append(ctx.saved_tensors[1]._rowwise_data is not None)
        return back(ctx, grad)

    with (
        mock.patch.object(Product, "backward", staticmethod(backward)),
        mock.patch.object(Linear, "forward", lambda self, x: Product.apply(x, self.weight)),
    ):
        for step in range(2):
            wrapper.zero_grad_buffer()
            torch.manual_seed(step)
            out = wrapper(torch.randn(8, SHAPES[0][1]).bfloat16())
            (out * torch.randn_like(out)).float().sum().backward()
            wrapper.finish_grad_sync()
            with torch.no_grad():
                for pair in wrapper.engine.pairs:
                    pair.optimizer._local_tensor.sub_(pair.grad._local_tensor, alpha=1e-3)
            wrapper.start_param_sync()
    return [pair.optimizer._local_tensor.clone() for pair in wrapper.engine.pairs]


def _same_bits(rank: int, world: int, folder: str) -> None:
    init_megatron()
    with standing_in(Path(folder)):
        group = own_group(rank, world)
        for strategy in ("optim_grads_params", "optim"):
            alone: list[bool] = []
            columns = _trained(strategy, group, alone)
            beside: list[bool] = []
            with mock.patch.object(units, "backward_use", lambda config, unit: Use.BOTH):
                both = _trained(strategy, group, beside)
            assert len(alone) == len(beside) == 2 * 3 * len(SHAPES)
            kept = strategy == "optim"  # rows are there then
            assert set(alone) == {kept} and all(beside), (strategy, alone, beside)
            for index, (mine, other) in enumerate(zip(columns, both, strict=True)):
                same(mine, other, f"{strategy}, parameter {index}")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_units_with_columns_alone_train_as_with_both(folder: Path) -> None:
    run_ranks(_same_bits, 2, str(folder), timeout=300)
