"""A start on the meta device of modules whose weights Transformer Engine quantizes when it
initializes them: bytes, scales and main weights are those of a start without it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import MegatronModule
from torch import nn

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.megatron.wrapper.announcement import _quantized
from tests.lib.gpt.gpt import STRATEGIES, Case, ddp_config, init_megatron, model_config
from tests.lib.quantized.te_checks import same, same_planes
from tests.lib.quantized.te_extension import FOLDERS, WITHOUT, run_te
from tests.lib.quantized.te_weights import RECIPES, gathered, planes_of, quantizer, te_parameter

CASE = Case(bf16=True)
SHAPES = ((256, 128), (128, 256))
METHODS = {
    "current": "Float8CurrentScaling", "delayed": "DelayedScaling",
    "block128": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling",
}  # fmt: skip

pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)


class Linear(nn.Module):
    """What Transformer Engine's modules have and do about weights that are quantized from the
    start: the constructor leaves a weight on the meta device as it is, `reset_parameters` draws,
    quantizes, with columns only where gradients are enabled, and keeps the value on the host."""

    def __init__(self, recipe: str, shape: tuple[int, int], device: str) -> None:
        super().__init__()
        from transformer_engine.common import recipe as recipes

        self._recipe = recipe
        self.primary_weights_in_fp8 = True
        self.fp8_meta = {"recipe": getattr(recipes, METHODS[recipe])()}
        self.param_init_meta = {"weight": SimpleNamespace(fp8_meta_index=0)}
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device))
        if device != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        assert not self.weight.is_meta
        nn.init.normal_(self.weight)
        found = te_parameter(self.weight, quantizer(self._recipe, torch.tensor([100.0, 0.0])))
        found.partition_dim = 0
        if self._recipe == "mxfp8" and not torch.is_grad_enabled():
            found._columnwise_data = None
            found._columnwise_scale_inv = None
        self.weight = found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class Layer(nn.Module):
    def __init__(self, *options: Any) -> None:
        super().__init__()
        recipe, *rest = options
        self.norm = nn.LayerNorm(SHAPES[0][1], device=rest[0], dtype=torch.bfloat16)
        self.linears = nn.Sequential(*(Linear(recipe, shape, *rest) for shape in SHAPES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linears(self.norm(x))


class Model(MegatronModule):
    def __init__(self, config: Any, *options: Any) -> None:
        super().__init__(config)
        self.layers = nn.Sequential(*(Layer(*options) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def started(recipe: str, strategy: str, meta: bool) -> FullyShardedDataParallel:
    config = model_config(CASE)
    config.init_model_with_meta_device = meta
    torch.manual_seed(5)
    model = Model(config, recipe, "meta" if meta else "cpu")
    return FullyShardedDataParallel(config, ddp_config(CASE, strategy), model, [Layer])


def held(wrapper: FullyShardedDataParallel) -> dict[str, torch.Tensor]:
    """Planes and scales of gathered weights, and this rank's rows of main weights."""
    found = {}
    for pair in wrapper.engine.pairs:
        found[f"main {pair.managed.fqns[0]}"] = pair.sharded._local_tensor.clone()
    for name, param in gathered(wrapper.engine):
        found |= {f"{key} {name}": value for key, value in planes_of(param).items()}
    return found


def _same_start(rank: int, world: int) -> None:
    init_megatron()
    for recipe in RECIPES:
        for strategy in STRATEGIES if recipe == "mxfp8" else STRATEGIES[-1:]:
            label = f"{recipe}, {strategy}"
            ours, other = (started(recipe, strategy, meta) for meta in (True, False))
            formats = {group.key.format.name for group in ours.engine.groups}
            assert formats == {"plain", RECIPES[recipe].name}, label
            numel = 3 * sum(rows * columns for rows, columns in SHAPES)
            said = _quantized(ours.engine.groups, ours.config)
            assert f"({numel} of them quantized: {RECIPES[recipe].name})" in said, label
            for pair in ours.engine.pairs:
                assert not [name for name in vars(pair.unsharded) if "high_precision" in name], (
                    label
                )
                assert pair.unsharded.ndim == 1 or pair.unsharded.partition_dim == 0, label
            same_planes(held(ours), held(other), label)
            if strategy == "no_shard":  # main weights are what was drawn, not what bytes stand for
                torch.manual_seed(5)
                for pair in ours.engine.pairs:
                    if pair.group.key.quantized:
                        drawn = torch.empty(pair.unsharded.shape, dtype=torch.bfloat16).normal_()
                        same(pair.sharded._local_tensor, drawn.float(), pair.managed.fqns[0])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_bytes_scales_and_main_weights_are_those_of_a_start_without_it(folder: Path) -> None:
    run_te(folder, _same_start, 2)
