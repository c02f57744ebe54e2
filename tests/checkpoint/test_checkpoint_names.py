"""Names in a checkpoint: those of the whole model, from what the modules of one rank know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megatron_fsdp_adapter.checkpoint.names import GlobalNames, global_names, split_depth


def _module(**attributes: Any) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _mlp(gated: bool, fc1: nn.Module | None = None, fc2: nn.Module | None = None) -> nn.Module:
    config = SimpleNamespace(gated_linear_unit=gated)
    return _module(
        config=config, linear_fc1=fc1 or nn.Linear(2, 4), linear_fc2=fc2 or nn.Linear(2, 2)
    )


def _moe(indices: list[int], grouped: bool, gated: bool) -> nn.Module:
    """grouped: as Transformer Engine's grouped layers hold experts, weights under numbers."""
    if grouped:
        numbered = {f"{name}{i}": nn.Parameter(nn.Linear(2, 2).weight.data)
                    for i in range(len(indices)) for name in ("weight", "bias")}  # fmt: skip
        experts = _mlp(gated, _module(**numbered), _module(**numbered))
    else:
        experts = _module(local_experts=nn.ModuleList(_mlp(gated) for _ in indices))
    return _module(local_expert_indices=indices, router=nn.Linear(2, 4),
                   shared_experts=_mlp(gated), experts=experts)  # fmt: skip


def _stage(numbers: list[int], mlp: nn.Module, prefix: str = "decoder") -> nn.Module:
    """A chunk with layers of these numbers, from one."""
    layers = nn.ModuleList(_module(layer_number=number, mlp=mlp) for number in numbers)
    return _module(**{prefix: _module(layers=layers)})


def _keys(model: nn.Module) -> list[str]:
    names = global_names(model)
    return [key for name, _ in model.named_parameters() for key in names.keys(name)]


def test_layers_are_counted_over_stages_whatever_wraps_the_model() -> None:
    model = _stage([4], _mlp(gated=False))
    assert _keys(model)[0] == "decoder.layers.3.mlp.linear_fc1.weight"
    wrapped = _module(module=_module(module=model))
    assert _keys(wrapped) == [f"module.module.{key}" for key in _keys(model)]
    # One MLP in two layers, which several names reach.
    names, last = global_names(_stage([3, 4], _mlp(gated=False))), "mlp.linear_fc2.bias"
    for own, number in ((0, 2), (1, 3)):
        assert names.of(f"decoder.layers.{own}.{last}") == f"decoder.layers.{number}.{last}"


def test_multi_token_prediction_layers_go_by_their_own_number_and_not_by_what_is_in_them() -> None:
    model = _stage([1], _mlp(gated=True), prefix="mtp")
    model.mtp.layers[0].transformer_layer = _module(layer_number=17, mlp=_mlp(gated=True))
    key = "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"
    assert {f"{key}_w", f"{key}_v"} <= set(_keys(model))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_experts_are_counted_over_expert_parallel_ranks(grouped: bool, gated: bool) -> None:
    keys = [_keys(_stage([2], _moe(own, grouped, gated))) for own in ([0, 1], [2, 3])]
    whole = _keys(_stage([2], _moe([0, 1, 2, 3], grouped, gated)))
    experts = [{key for key in part if ".experts." in key} for part in keys]
    assert not experts[0] & experts[1]
    assert {*keys[0], *keys[1]} == set(whole)
    name = "linear_fc1.weight3" if grouped else "local_experts.3.linear_fc1.weight"
    assert f"decoder.layers.1.mlp.experts.{name}" + "_v" * gated in whole
    assert not any(key.endswith(("_w", "_v")) for key in whole) or gated


def test_only_the_first_linear_layer_of_a_gated_mlp_has_halves() -> None:
    model = _stage([1], _mlp(gated=True))
    model.decoder.layers[0].mlp.linear_fc1.layer_norm_weight = nn.Parameter(nn.Linear(1, 2).weight)
    last = [key.removeprefix("decoder.layers.0.mlp.") for key in _keys(model)]
    halves = [f"linear_fc1.{name}_{half}" for name in ("weight", "bias") for half in "wv"]
    assert last == [*halves, "linear_fc1.layer_norm_weight", "linear_fc2.weight", "linear_fc2.bias"]


def test_an_adapter_beside_the_first_linear_layer_has_halves_as_that_has() -> None:
    """Its output is cut over tensor-parallel ranks as the layer's: gate over linear on each."""
    layers = [
        _module(
            to_wrap=nn.Linear(2, 4),
            adapter=_module(linear_in=nn.Linear(2, 1, False), linear_out=nn.Linear(1, 4, False)),
        )
        for _ in range(2)
    ]
    keys = _keys(_stage([1], _mlp(True, *layers)))
    last = {key.removeprefix("decoder.layers.0.mlp.") for key in keys}
    halved = {f"linear_fc1.{name}_{half}" for half in "wv" for name in
              ("to_wrap.weight", "to_wrap.bias", "adapter.linear_out.weight")}  # fmt: skip
    assert {key for key in last if key.endswith(("_w", "_v"))} == halved
    assert {"linear_fc1.adapter.linear_in.weight", "linear_fc2.adapter.linear_out.weight"} <= last


def test_a_copy_of_a_tied_embedding_has_the_name_of_the_embedding() -> None:
    last = _module(output_layer=nn.Linear(2, 4, bias=False))
    assert _keys(last) == ["output_layer.weight"]
    last.output_layer.weight.shared_embedding = True
    assert _keys(last) == ["embedding.word_embeddings.weight"]
    # Where the chunk holds the embedding too, both names are taken already.
    last.embedding = _module(word_embeddings=nn.Linear(2, 4, bias=False))
    assert _keys(last) == ["output_layer.weight", "embedding.word_embeddings.weight"]


def test_two_parameters_under_one_key_are_refused_with_both_names() -> None:
    model = _stage([2], _mlp(gated=False))
    model.decoder.layers.append(_module(layer_number=2, mlp=_mlp(gated=False)))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp.* and .*layers\.1\.mlp"):
        global_names(model)


def test_names_of_a_model_without_megatrons_numbers_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert _keys(model) == [name for name, _ in model.named_parameters()]
    assert GlobalNames().of("module.decoder.layers.0.x") == "module.decoder.layers.0.x"
    assert split_depth("module.module.a.module.b") == ("module.module.", "a.module.b")


def test_layers_whose_slices_do_not_join_are_known() -> None:
    mixer = type("MambaMixer", (nn.Module,), {})()
    mixer.in_proj = nn.Linear(2, 2)
    names = global_names(_stage([1], mixer))
    assert names.is_interleaved("module.decoder.layers.0.mlp.in_proj.weight")
    assert not names.is_interleaved("decoder.layers.0.mlp_other.weight")
