"""Models whose weights are in Transformer Engine's classes: what computes, and what they export."""

from __future__ import annotations

from typing import Any

import torch

from tests.lib.gpt.gpt import Trainer
from tests.lib.quantized.te_checks import same_planes
from tests.lib.quantized.te_weights import KNOWS, gathered, te_whole


def check_weights(trainer: Trainer, recipe: str, label: str) -> int:
    """Gathered bytes and scales, against TE's function over whole main weights."""
    mains = trainer.params()
    checked = 0
    for name, param in gathered(trainer.wrapper.engine):
        same_planes(param, te_whole(recipe, mains[name]), f"{label}, {name}")
        # cuBLAS refuses a scale that begins elsewhere.
        assert all(one.data_ptr() % 16 == 0 for one in KNOWS.scales(param)), f"{label}, {name}"
        checked += 1
    return checked


def computed_with(engine: Any, recipe: str) -> dict[str, torch.Tensor]:
    """Gathered bytes and scales by name, as modules see them."""
    found = {}
    for name, param in gathered(engine):
        fields = KNOWS.fields(param)
        found[name] = fields["rowwise"].clone().view(torch.float8_e4m3fn)
        scale = fields.get("rowwise_scales", (*KNOWS.scales(param), None)[0])
        rows, columns = param.shape
        if recipe == "block128":
            scale = scale[: -(-rows // 128), : -(-columns // 128)]
        found[name + "_scale_inv"] = scale.clone()
    return found
