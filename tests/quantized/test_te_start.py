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
from tests.distributed.gpt import STRATEGIES, Case, ddp_config, init_megatron, model_config
from tests.distributed.launch import run_ranks
from tests.quantized.te_checks import own_group, same
from tests.quantized.te_extension import FOLDERS, standing_in
from tests.quantized.te_modules import FORMATS, KNOWS
from tests.quantized.test_te_params import METHODS
from tests.quantized.test_te_wrapper import made

CASE = Case(bf16=True)
SHAPES = ((256, 128), (128, 256))

pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
)


class Linear(nn.Module):
    """What Transformer Engine's modules have and do about weights that are quantized from the
    start: the constructor leaves a weight on the meta device as it is, `reset_parameters` draws,
    quantizes, with columns only where gradients are enabled, and keeps the value on the host."""

    def __init__(self, recipe: str, shape: tuple[int, int], device: str, group: Any) -> None:
        super().__init__()
        from transformer_engine.common import recipe as recipes

        self._recipe, self._group = recipe, group
        self.primary_weights_in_fp8 = True
        self.fp8_meta = {"recipe": getattr(recipes, METHODS[recipe])()}
        self.param_init_meta = {"weight": SimpleNamespace(fp8_meta_index=0)}
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device))
        if device != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        assert not self.weight.is_meta
        nn.init.normal_(self.weight)
        found = made(self._recipe, self.weight, self._group)
        found.partition_dim = 0
        if self._recipe == "mxfp8" and not torch.is_grad_enabled():
            found._columnwise_data = found._columnwise_scale_inv = None
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


def started(recipe: str, strategy: str, meta: bool, group: Any) -> FullyShardedDataParallel:
    config = model_config(CASE)
    config.init_model_with_meta_device = meta
    torch.manual_seed(5)
    model = Model(config, recipe, "meta" if meta else "cpu", group)
    return FullyShardedDataParallel(config, ddp_config(CASE, strategy), model, [Layer])


def held(wrapper: FullyShardedDataParallel) -> dict[str, torch.Tensor]:
    """Planes and scales of gathered weights, and this rank's rows of main weights."""
    found = {}
    for pair in wrapper.engine.pairs:
        found[f"main {pair.managed.fqns[0]}"] = pair.sharded._local_tensor.clone()
    wrapper.engine.to_unsharded()
    for unit in wrapper.engine.units:
        wrapper.engine.gather.need(unit)
        for entry in [e for group in unit.groups if group.key.quantized for e in group.managed]:
            values = {**KNOWS.fields(entry.param), **dict(enumerate(KNOWS.scales(entry.param)))}
            found |= {f"{key} {entry.fqns[0]}": value.clone() for key, value in values.items()}
        wrapper.engine.gather.release(unit)
    return found


def _same_start(rank: int, world: int, folder: str) -> None:
    init_megatron()
    with standing_in(Path(folder)):
        group = own_group(rank, world)
        for recipe in FORMATS:
            for strategy in STRATEGIES if recipe == "mxfp8" else STRATEGIES[-1:]:
                label = f"{recipe}, {strategy}"
                ours, other = (started(recipe, strategy, meta, group) for meta in (True, False))
                formats = {group.key.format.name for group in ours.engine.groups}
                assert formats == {"plain", FORMATS[recipe].name}, label
                numel = 3 * sum(rows * columns for rows, columns in SHAPES)
                said = f"({numel} of them quantized: {FORMATS[recipe].name})"
                assert said in ours._quantized(), label
                for pair in ours.engine.pairs:
                    assert not [
                        name for name in vars(pair.unsharded) if "high_precision" in name
                    ], label
                    assert pair.unsharded.ndim == 1 or pair.unsharded.partition_dim == 0, label
                mine, theirs = held(ours), held(other)
                assert mine.keys() == theirs.keys()
                for name, value in mine.items():
                    same(value, theirs[name], f"{label}, {name}")


def _mains_are_the_values_before(rank: int, world: int, folder: str) -> None:
    """Not what the bytes stand for."""
    init_megatron()
    with standing_in(Path(folder)):
        group = own_group(rank, world)
        wrapper = started("blockwise", "no_shard", True, group)
        quantized = [pair for pair in wrapper.engine.pairs if pair.group.key.quantized]
        assert len(quantized) == 3 * len(SHAPES)
        torch.manual_seed(5)
        for pair in quantized:
            drawn = nn.init.normal_(torch.empty(pair.unsharded.shape, dtype=torch.bfloat16))
            same(pair.sharded._local_tensor, drawn.float(), pair.managed.fqns[0])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_bytes_scales_and_main_weights_are_those_of_a_start_without_it(folder: Path) -> None:
    run_ranks(_same_start, 2, str(folder), timeout=300)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_main_weights_begin_as_the_values_before_quantization(folder: Path) -> None:
    run_ranks(_mains_are_the_values_before, 2, str(folder), timeout=300)
