"""Modules that write the gradients of quantized weights into the bucket by themselves, in each of
the protocols that Transformer Engine's modules keep to, against gradients from autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.megatron import units
from megatron_fsdp_adapter.megatron.wgrad_probe import Observed, Observer
from tests.distributed.gpt import STRATEGIES, ddp_config, init_megatron, model_config
from tests.quantized import test_te_start
from tests.quantized.te_checks import same
from tests.quantized.te_extension import FOLDERS, WITHOUT, run_te
from tests.quantized.test_te_start import CASE, SHAPES, Layer, Linear, Model

RECIPES = ("delayed", "current", "blockwise")
BOUND = 2.0**-7
"""Relative: autograd adds up the calls of a microbatch in bf16."""
SEEN = {
    WgradProtocol.OVERWRITES: Observed(adds=True, overwrites_in_backward=True),
    WgradProtocol.OVERWRITES_ALWAYS: Observed(adds=True, told_in_forward=True),
    WgradProtocol.ACCUMULATES: Observed(adds=True),
}

pytestmark = pytest.mark.skipif(not FOLDERS, reason=WITHOUT)


class _Product(torch.autograd.Function):
    """As Transformer Engine's: saves the parameter object, and asks it for `main_grad`. Checked
    against `module/linear.py` of 2.11."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, told_in_forward: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.early = getattr(weight, "overwrite_main_grad", False) if told_in_forward else None
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        main = weight.get_main_grad() if hasattr(weight, "__fsdp_param__") else weight.main_grad
        assert main.shape == weight.shape and main.dtype == torch.float32
        overwrites = getattr(weight, "overwrite_main_grad", False)
        if overwrites if ctx.early is None else ctx.early:
            main.copy_(by_weight)
        else:
            main.add_(by_weight)
        return grad @ weight.dequantize(), None, None


class Fused(Linear):
    """Called twice in a forward."""

    fuse_wgrad_accumulation, told_in_forward = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fuse_wgrad_accumulation:
            return nn.functional.linear(x, self.weight)
        return _Product.apply(x, self.weight, self.told_in_forward)


class Twice(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


def gradients(
    recipe: str, strategy: str, writer: WgradProtocol | None
) -> dict[str, torch.Tensor]:
    """Of this rank's rows, after two steps of two microbatches. writer: None for autograd."""
    config = model_config(CASE)
    config.gradient_accumulation_fusion = writer is not None
    kept: Any = writer
    if writer is WgradProtocol.OVERWRITES_ALWAYS and strategy in ("no_shard", "optim"):
        kept = WgradProtocol.ACCUMULATES  # nobody knows in forward which write will be the first
    asked = []

    def observed(self: Observer, owner: Any, dtype: torch.dtype, is_quantized: bool) -> Observed:
        asked.append(is_quantized)
        return SEEN[writer]  # type: ignore[index]

    torch.manual_seed(5)
    Fused.fuse_wgrad_accumulation = writer is not None
    Fused.told_in_forward = kept is WgradProtocol.OVERWRITES_ALWAYS
    with (
        mock.patch.object(test_te_start, "Linear", Fused),
        mock.patch.object(test_te_start, "Layer", Twice),
        mock.patch.object(units.Observer, "__call__", observed),
    ):
        model = Model(config, recipe, "cpu")
        wrapper = FullyShardedDataParallel(config, ddp_config(CASE, strategy), model, [Twice])
    quantized = [pair for pair in wrapper.engine.pairs if pair.group.key.quantized]
    assert {pair.managed.writer for pair in quantized} == {kept or WgradProtocol.AUTOGRAD}
    assert asked == [True] * (len(quantized) if writer else 0)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        wrapper.zero_grad_buffer()
        for number in range(2):
            x = torch.randn(3, 8, SHAPES[0][1], generator=generator).bfloat16()
            wrapper.engine.is_last_microbatch = number == 1
            wrapper(x.requires_grad_()).float().square().mean().backward()
        wrapper.finish_grad_sync()
    return {
        pair.managed.fqns[0]: pair.sharded.grad._local_tensor.clone()
        for pair in wrapper.engine.pairs
    }


def _same_gradients(rank: int, world: int) -> None:
    init_megatron()
    for number, strategy in enumerate(STRATEGIES):
        recipe = RECIPES[number % len(RECIPES)]
        expected = gradients(recipe, strategy, None)
        found = {one: gradients(recipe, strategy, one) for one in SEEN}
        for writer, grads in found.items():
            assert grads.keys() == expected.keys()
            for name, value in expected.items():
                label = f"{strategy}, {recipe}, {writer.value}, {name}"
                same(grads[name], found[WgradProtocol.ACCUMULATES][name], label)
                error = (grads[name] - value).norm() / value.norm().clamp(min=1e-9)
                assert error < BOUND, f"{label}: off by {error:.3g}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_gradients_are_those_of_autograd_in_every_protocol(folder: Path) -> None:
    run_te(folder, _same_gradients, 2)
