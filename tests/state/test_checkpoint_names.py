"""Names in a checkpoint: those of the whole model, from what the modules of one rank know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.state.names import global_names

CHECKS = ("state/names.py",)


def _module(**attributes: Any) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _params(*names: str) -> nn.Module:
    return _module(**{name: nn.Parameter(torch.zeros(2)) for name in names})


def _mlp(gated: bool, fc1: nn.Module | None = None, fc2: nn.Module | None = None) -> nn.Module:
    config = SimpleNamespace(gated_linear_unit=gated)
    return _module(
        config=config, linear_fc1=fc1 or nn.Linear(2, 4), linear_fc2=fc2 or nn.Linear(2, 2)
    )


def _moe(indices: list[int], grouped: bool, gated: bool) -> nn.Module:
    """grouped: as Transformer Engine's grouped layers hold experts, weights under numbers."""
    if grouped:
        numbered = [f"{name}{i}" for i in range(len(indices)) for name in ("weight", "bias")]
        experts = _mlp(gated, _params(*numbered), _params(*numbered))
    else:
        experts = _module(local_experts=nn.ModuleList(_mlp(gated) for _ in indices))
    return _module(
        local_expert_indices=indices,
        router=nn.Linear(2, 4),
        shared_experts=_mlp(gated),
        experts=experts,
    )


def _stage(numbers: list[int], mlp: nn.Module) -> nn.Module:
    """A chunk with layers of these numbers, from one."""
    layers = nn.ModuleList(_module(layer_number=number, mlp=mlp) for number in numbers)
    return _module(decoder=_module(layers=layers))


def _keys(model: nn.Module) -> list[str]:
    names = global_names(model)
    return [key for name, _ in model.named_parameters() for key in names.keys(name)]


def test_layers_are_counted_over_stages_whatever_wraps_the_model() -> None:
    model = _stage([4], _mlp(gated=False))
    assert _keys(model)[0] == "decoder.layers.3.mlp.linear_fc1.weight"
    wrapped = _module(module=_module(module=model))
    assert _keys(wrapped) == [f"module.module.{key}" for key in _keys(model)]
    # One MLP in two layers, which several names reach.
    names = global_names(_stage([3, 4], _mlp(gated=False)))
    last = "mlp.linear_fc2.bias"
    for own, number in ((0, 2), (1, 3)):
        assert names.of(f"decoder.layers.{own}.{last}") == f"decoder.layers.{number}.{last}"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_experts_are_counted_over_expert_parallel_ranks(grouped: bool, gated: bool) -> None:
    def keys_of(*experts: int) -> set[str]:
        return set(_keys(_stage([2], _moe([*experts], grouped, gated))))

    first = keys_of(0, 1)
    second = keys_of(2, 3)
    whole = keys_of(0, 1, 2, 3)
    assert not any(".experts." in key for key in first & second)
    assert first | second == whole
    if grouped:
        name = "linear_fc1.weight3"
    else:
        name = "local_experts.3.linear_fc1.weight"
    half = "_v" if gated else ""
    assert f"decoder.layers.1.mlp.experts.{name}{half}" in whole
    if not gated:
        assert not any(key.endswith(("_w", "_v")) for key in whole)


def _adapted() -> nn.Module:
    """As Megatron-Bridge wraps a linear layer: the output of the adapter is cut over
    tensor-parallel ranks as the layer's, gate over linear on each."""
    beside = _module(linear_in=nn.Linear(2, 1, False), linear_out=nn.Linear(1, 4, False))
    return _module(to_wrap=nn.Linear(2, 4, False), adapter=beside)


def _tied(**more: nn.Module) -> nn.Module:
    """A last stage whose output layer is a copy of the embedding."""
    last = _module(output_layer=nn.Linear(2, 4, bias=False), **more)
    last.output_layer.weight.shared_embedding = True
    return last


EMBEDDING = "embedding.word_embeddings.weight"
MLP = "decoder.layers.0.mlp.linear_fc"
MTP = "mtp.layers.0.transformer_layer.mlp.linear_fc"
KEYS = {}
KEYS["the first linear layer of a gated MLP has halves, and not its norm"] = (
    _stage([1], _mlp(True, _params("weight", "bias", "layer_norm_weight"))),
    [
        f"{MLP}1.weight_w",
        f"{MLP}1.weight_v",
        f"{MLP}1.bias_w",
        f"{MLP}1.bias_v",
        f"{MLP}1.layer_norm_weight",
        f"{MLP}2.weight",
        f"{MLP}2.bias",
    ],
)
KEYS["an adapter beside it has halves as that has"] = (
    _stage([1], _mlp(True, _adapted(), _adapted())),
    [
        f"{MLP}1.to_wrap.weight_w",
        f"{MLP}1.to_wrap.weight_v",
        f"{MLP}1.adapter.linear_in.weight",
        f"{MLP}1.adapter.linear_out.weight_w",
        f"{MLP}1.adapter.linear_out.weight_v",
        f"{MLP}2.to_wrap.weight",
        f"{MLP}2.adapter.linear_in.weight",
        f"{MLP}2.adapter.linear_out.weight",
    ],
)
PREDICTS = _mlp(True, _params("weight"), _params("weight"))
OWN_NUMBER = _module(layer_number=1, transformer_layer=_module(layer_number=17, mlp=PREDICTS))
KEYS["prediction layers go by their own number and not by what is in them"] = (
    _module(mtp=_module(layers=nn.ModuleList([OWN_NUMBER]))),
    [f"{MTP}1.weight_w", f"{MTP}1.weight_v", f"{MTP}2.weight"],
)
KEYS["an output layer"] = (
    _module(output_layer=nn.Linear(2, 4, bias=False)),
    ["output_layer.weight"],
)
KEYS["a copy of a tied embedding"] = (_tied(), [EMBEDDING])
KEYS["beside the embedding itself"] = (
    _tied(embedding=_module(word_embeddings=nn.Linear(2, 4, bias=False))),
    ["output_layer.weight", EMBEDDING],
)
KEYS["a model without Megatron's numbers"] = (
    nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, False)),
    ["0.weight", "0.bias", "1.weight"],
)


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_a_model(name: str) -> None:
    model, expected = KEYS[name]
    assert _keys(model) == expected


def test_two_parameters_under_one_key_are_refused_with_both_names() -> None:
    model = _stage([2], _mlp(gated=False))
    model.decoder.layers.append(_module(layer_number=2, mlp=_mlp(gated=False)))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp.* and .*layers\.1\.mlp"):
        global_names(model)
