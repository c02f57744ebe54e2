"""Names in a checkpoint: those of the whole model, from what the modules of one rank know."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from megatron_fsdp_adapter.checkpoint.names import GlobalNames, global_names, split_depth


def _mlp(gated: bool) -> nn.Module:
    mlp = nn.Module()
    mlp.config = SimpleNamespace(gated_linear_unit=gated)
    mlp.linear_fc1, mlp.linear_fc2 = nn.Linear(2, 4), nn.Linear(2, 2)
    return mlp


def _grouped(count: int, gated: bool) -> nn.Module:
    """Experts as Transformer Engine's grouped layers hold them: weights under numbers."""
    mlp = _mlp(gated)
    for name in ("linear_fc1", "linear_fc2"):
        layer = nn.Module()
        for i in range(count):
            layer.register_parameter(f"weight{i}", nn.Parameter(nn.Linear(2, 2).weight.data))
            layer.register_parameter(f"bias{i}", nn.Parameter(nn.Linear(2, 2).bias.data))
        setattr(mlp, name, layer)
    return mlp


def _moe(indices: list[int], grouped: bool, gated: bool) -> nn.Module:
    moe = nn.Module()
    moe.local_expert_indices = indices
    moe.router = nn.Linear(2, 4)
    moe.shared_experts = _mlp(gated)
    if grouped:
        moe.experts = _grouped(len(indices), gated)
    else:
        moe.experts = nn.Module()
        moe.experts.local_experts = nn.ModuleList(_mlp(gated) for _ in indices)
    return moe


def _stage(numbers: list[int], mlp: nn.Module, prefix: str = "decoder") -> nn.Module:
    """A chunk with layers of these numbers, from one."""
    model, block = nn.Module(), nn.Module()
    block.layers = nn.ModuleList()
    for number in numbers:
        layer = nn.Module()
        layer.layer_number, layer.mlp = number, mlp
        block.layers.append(layer)
    setattr(model, prefix, block)
    return model


def _keys(model: nn.Module) -> list[str]:
    names = global_names(model)
    return [key for name, _ in model.named_parameters() for key in names.keys(name)]


def test_layers_are_counted_over_stages_whatever_wraps_the_model() -> None:
    model = _stage([4], _mlp(gated=False))
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module.module = model
    assert _keys(model)[0] == "decoder.layers.3.mlp.linear_fc1.weight"
    assert _keys(wrapped) == [f"module.module.{key}" for key in _keys(model)]


def test_a_layer_that_several_names_reach_is_renumbered_under_each() -> None:
    model = _stage([3, 4], _mlp(gated=False))  # one mlp in both layers
    names = global_names(model)
    last = "mlp.linear_fc2.bias"
    assert names.of(f"decoder.layers.1.{last}") == f"decoder.layers.3.{last}"
    assert names.of(f"decoder.layers.0.{last}") == f"decoder.layers.2.{last}"


def test_multi_token_prediction_layers_go_by_their_own_number_and_not_by_what_is_in_them() -> None:
    model = _stage([1], _mlp(gated=True), prefix="mtp")
    inner = model.mtp.layers[0]
    inner.transformer_layer = nn.Module()
    inner.transformer_layer.layer_number = 17
    inner.transformer_layer.mlp = _mlp(gated=True)
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
    model = _stage([1], _mlp(gated=True))
    mlp = model.decoder.layers[0].mlp
    for name in ("linear_fc1", "linear_fc2"):
        layer = nn.Module()
        layer.to_wrap, layer.adapter = getattr(mlp, name), nn.Module()
        layer.adapter.linear_in = nn.Linear(2, 1, bias=False)
        layer.adapter.linear_out = nn.Linear(1, 4, bias=False)
        setattr(mlp, name, layer)
    last = {key.removeprefix("decoder.layers.0.mlp.") for key in _keys(model)}
    halved = {f"linear_fc1.{name}_{half}" for half in "wv" for name in
              ("to_wrap.weight", "to_wrap.bias", "adapter.linear_out.weight")}  # fmt: skip
    assert {key for key in last if key.endswith(("_w", "_v"))} == halved
    assert "linear_fc1.adapter.linear_in.weight" in last
    assert "linear_fc2.adapter.linear_out.weight" in last


def test_a_copy_of_a_tied_embedding_has_the_name_of_the_embedding() -> None:
    last = nn.Module()
    last.output_layer = nn.Linear(2, 4, bias=False)
    assert _keys(last) == ["output_layer.weight"]
    last.output_layer.weight.shared_embedding = True
    assert _keys(last) == ["embedding.word_embeddings.weight"]
    # Where the chunk holds the embedding too, both names are taken already.
    last.embedding = nn.Module()
    last.embedding.word_embeddings = nn.Linear(2, 4, bias=False)
    assert _keys(last) == ["output_layer.weight", "embedding.word_embeddings.weight"]


def test_two_parameters_under_one_key_are_refused_with_both_names() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.mlp.* and .*layers\.1\.mlp"):
        model = _stage([2], _mlp(gated=False))
        second = nn.Module()
        second.layer_number, second.mlp = 2, _mlp(gated=False)
        model.decoder.layers.append(second)
        global_names(model)


def test_names_of_a_model_without_megatrons_numbers_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert _keys(model) == [name for name, _ in model.named_parameters()]
    assert GlobalNames().of("module.decoder.layers.0.x") == "module.decoder.layers.0.x"
    assert split_depth("module.module.a.module.b") == ("module.module.", "a.module.b")


def test_layers_whose_slices_do_not_join_are_known() -> None:
    mixer = type("MambaMixer", (nn.Module,), {})()
    mixer.in_proj = nn.Linear(2, 2)
    model = _stage([1], mixer)
    names = global_names(model)
    assert names.is_interleaved("module.decoder.layers.0.mlp.in_proj.weight")
    assert not names.is_interleaved("decoder.layers.0.mlp_other.weight")
