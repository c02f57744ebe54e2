"""A linear layer that makes its weight as Transformer Engine's does."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from tests.lib.quantized.te_weights import quantizer, te_parameter

METHODS = {
    "current": "Float8CurrentScaling", "delayed": "DelayedScaling",
    "block128": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling",
}  # fmt: skip


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
