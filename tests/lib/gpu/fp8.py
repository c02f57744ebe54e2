"""Recipes of FP8, and the bytes of a model's quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_fsdp_adapter.quantized.tables import BLOCK
from tests.lib.gpt.gpt import Case, Trainer, plain_name
from tests.lib.quantized.te_checks import same

CASE = Case(
    num_layers=2,
    hidden=256,
    heads=4,
    ffn=640,
    vocab=256,
    seq=64,
    batch=2,
    bf16=True,
    swiglu=True,
    bias=False,
    microbatches=1,
    clip=0.0,
    overlap=False,
)
RECIPES = ("delayed", "tensorwise", "blockwise")
Weights = tuple[Mapping[str, tuple[torch.Tensor, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Quantized weights and main weights."""


def quantized_of(trainer: Trainer) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Bytes and scales of every quantized weight, copied, by name. What fills up the scales of
    blocks to a multiple of four belongs to no block."""
    found = {}

    def note(name: str, param: Any) -> None:
        data = getattr(param, "_data", None)
        if data is not None:
            found[plain_name(name)] = data.clone(), param._scale_inv.clone()
        elif hasattr(param, "_rowwise_data"):
            scales = param._rowwise_scale_inv[:, : -(-param.shape[1] // BLOCK)]
            found[plain_name(name)] = param._rowwise_data.clone(), scales.clone()

    if trainer.strategy is None:
        for name, param in trainer.wrapper.named_parameters():
            note(name, param)
        return found
    engine = trainer.wrapper.engine
    engine.to_unsharded()
    for unit in engine.units:
        engine.gather.unshard(unit)
        for group in unit.groups:
            for entry in group.managed if group.key.quantized else ():
                note(entry.fqns[0], entry.param)
        engine.gather.reshard(unit)
    return found


def same_weights(mine: Weights, other: Weights, label: str, count: int) -> None:
    """Bits of all quantized weights, by bytes and scales, and of main weights."""
    (ours, mains) = mine
    (theirs, reference) = other
    assert ours.keys() == theirs.keys() and len(ours) == count, (label, sorted(ours))
    for name, (data, scales) in ours.items():
        same(data, theirs[name][0], f"{label}, bytes of {name}")
        same(scales, theirs[name][1], f"{label}, scales of {name}")
    assert mains.keys() == reference.keys(), label
    for name, main in mains.items():
        same(main, reference[name], f"{label}, main weights of {name}")
