"""A start on the meta device of modules whose weights Transformer Engine quantizes when it
initializes them: bytes, scales and main weights are those of a start without it."""

from __future__ import annotations

from pathlib import Path
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
from tests.lib.quantized.te_linear import Linear
from tests.lib.quantized.te_weights import RECIPES, gathered, planes_of

CHECKS = ("quantized/start.py", "megatron/wrapper/announcement.py")

CASE = Case(bf16=True)
SHAPES = ((256, 128), (128, 256))

pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)


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
