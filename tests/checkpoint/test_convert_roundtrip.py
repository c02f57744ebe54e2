"""There and back between formats is the identity, bit for bit; and the formats are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from convert_cases import (
    HIDDEN,
    MODELS,
    VOCAB,
    Model,
    differences,
    fsdp_state,
    hf_shapes,
    hugging_face_folder,
    load_all,
    save_fsdp,
    shapes,
)

from megatron_fsdp_adapter.checkpoint.convert import Options, convert, detect_format
from megatron_fsdp_adapter.cli.verify import examine

SMALL = 700
"""Bytes of a block: most tensors fall into several."""

FOLDER = "iter_0000003"
IMPORTED = "iter_0000001"


SLOW = ("experts behind a dense layer", "dense, fp32, not gated")
NAMES = [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in MODELS]


def style_options(model: Model, **options: object) -> Options:
    return Options(
        transformer_impl="transformer_engine" if model.te else "local",
        experts="grouped" if model.grouped else "sequential",
        **{"block_bytes": SMALL, **options},
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_to_torch_dist_and_back_is_the_identity(tmp_path: Path, name: str) -> None:
    save_fsdp(tmp_path / "a", fsdp_state(MODELS[name]))
    small = Options(block_bytes=SMALL)
    there = convert(tmp_path / "a", tmp_path / "b", "torch_dist", options=small)
    assert detect_format(tmp_path / "b") == "torch_dist" and there.dropped == ()
    convert(tmp_path / "b", tmp_path / "c", "fsdp_dtensor", options=small)
    before, after = load_all(tmp_path / "a" / FOLDER), load_all(tmp_path / "c" / FOLDER)
    assert len(before) > 100
    assert differences(before, after) == []
    assert (tmp_path / "c" / "latest_checkpointed_iteration.txt").read_text() == "3"
    report = examine(tmp_path / "c" / FOLDER)
    assert report["intact"] and report["without_digest"] == []


@pytest.mark.parametrize("name", NAMES)
def test_torch_dist_stacks_layers_and_experts_and_rounds_what_the_model_computes_in(
    tmp_path: Path, name: str
) -> None:
    model = MODELS[name]
    state = fsdp_state(model)
    save_fsdp(tmp_path / "a", state)
    convert(tmp_path / "a", tmp_path / "b", "torch_dist")
    found = load_all(tmp_path / "b" / FOLDER)
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    biases = {key: value for key, value in found.items() if key.endswith("expert_bias")}
    assert all(value.dtype == torch.float32 for value in biases.values())
    assert bool(biases) == bool(model.experts)
    qkv = "self_attention.linear_qkv.weight"
    whole = torch.stack(
        [state["model"][f"module.decoder.layers.{i}.{qkv}"] for i in range(model.layers)]
    )
    one_key = model.dense_layers == 0
    keys = [f"decoder.layers.{qkv}"] if one_key else [
        f"decoder.layers.{i}.{qkv}" for i in range(model.layers)
    ]  # fmt: skip
    for key, expected in zip(keys, whole.unsqueeze(0) if one_key else whole, strict=True):
        assert found[key].dtype == dtype and torch.equal(found[key], expected.to(dtype))
        assert torch.equal(found[f"optimizer.state.param.{key}"], expected)
    if not model.experts:
        return
    at, moe = ("", 0) if one_key else (f"{model.layers - 1}.", model.layers - 1)
    down = found[f"decoder.layers.{at}mlp.experts.experts.linear_fc2.weight"]
    assert down.shape[:-2] == ((model.layers,) if one_key else ()) + (model.experts,)
    last = f"module.decoder.layers.{model.layers - 1 if one_key else moe}.mlp.experts."
    named = "linear_fc2.weight1" if model.grouped else "local_experts.1.linear_fc2.weight"
    picked = down[-1, 1] if one_key else down[1]
    assert torch.equal(picked, state["model"][last + named].to(dtype))


@pytest.mark.parametrize(
    "name", [n for n, m in MODELS.items() if m.swiglu and not m.dense_layers]
)
@pytest.mark.parametrize(
    "max_file_bytes", [pytest.param(10**9, marks=pytest.mark.full), 5000]
)
def test_to_safetensors_and_back_is_the_identity_of_weights(
    tmp_path: Path, name: str, max_file_bytes: int
) -> None:
    model = MODELS[name]
    state = fsdp_state(model)
    for key in [key for key in state["model"] if key.endswith("expert_bias")]:
        del state["model"][key]  # Mixtral has none
    save_fsdp(tmp_path / "a", state)
    options = style_options(model, max_file_bytes=max_file_bytes, make_vocab_size_divisible_by=1)
    there = convert(tmp_path / "a", tmp_path / "hf", "huggingface", options=options)
    assert there.dropped == ("everything but weights",)
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert (len(files) > 1) == (max_file_bytes == 5000)
    _check_safetensors(tmp_path / "hf", model, state)
    convert(tmp_path / "hf", tmp_path / "c", "fsdp_dtensor", options=options)
    after = load_all(tmp_path / "c" / IMPORTED)
    before = {f"model.{name}": value for name, value in state["model"].items()}
    weights = {key: value for key, value in after.items() if key.startswith("model.")}
    assert differences(before, weights) == []


def _check_safetensors(folder: Path, model: Model, state: dict) -> None:
    """By the safetensors package and by hand: the fourth query head is the second of group 1."""
    from safetensors.torch import load_file

    found = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == hf_shapes(model)
    fused = state["model"]["module.decoder.layers.0.self_attention.linear_qkv.weight"]
    group = fused.view(2, 4, 4, HIDDEN)  # groups, (2 queries, key, value), head, hidden
    attention = "model.layers.0.self_attn."
    assert torch.equal(found[f"{attention}q_proj.weight"][12:16], group[1, 1])
    assert torch.equal(found[f"{attention}k_proj.weight"][4:8], group[1, 2])
    assert torch.equal(found[f"{attention}v_proj.weight"][4:8], group[1, 3])
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == 2 and config["vocab_size"] == VOCAB


@pytest.mark.parametrize("experts", [0, 2])
def test_hugging_face_to_torch_dist_and_back(tmp_path: Path, experts: int) -> None:
    """Any format goes into any other, without a third folder in between."""
    from safetensors.torch import load_file

    hugging_face_folder(tmp_path / "hf", Model(experts=experts))
    options = Options(make_vocab_size_divisible_by=1, block_bytes=SMALL)
    convert(tmp_path / "hf", tmp_path / "td", "torch_dist", options=options)
    convert(tmp_path / "td", tmp_path / "back", "huggingface", options=options)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("hf", "back"))
    assert differences(before, after) == []


def test_rows_of_padding_are_added_as_zeros_and_cut_off_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    hugging_face_folder(tmp_path / "hf", Model())
    options = Options(make_vocab_size_divisible_by=20)
    convert(tmp_path / "hf", tmp_path / "a", "fsdp_dtensor", options=options)
    found = load_all(tmp_path / "a" / IMPORTED)
    for name in ("embedding.word_embeddings", "output_layer"):
        rows = found[f"model.module.{name}.weight"]
        assert rows.shape == (40, HIDDEN) and not rows[VOCAB:].any() and rows[:VOCAB].any()
    cut = Options(vocab_size=VOCAB)
    convert(tmp_path / "a", tmp_path / "back", "huggingface", options=cut)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("hf", "back"))
    assert differences(before, after) == []


def test_modules_of_another_kind_get_other_names_and_the_same_values(tmp_path: Path) -> None:
    """Core's layers with one module per expert, to Transformer Engine's with grouped experts."""
    local = Model(experts=4)
    save_fsdp(tmp_path / "a", fsdp_state(local))
    options = Options(transformer_impl="transformer_engine", experts="grouped")
    convert(tmp_path / "a", tmp_path / "b", "fsdp_dtensor", options=options)
    found = load_all(tmp_path / "b" / FOLDER)
    wanted = shapes(local.but(te=True, grouped=True))
    names = {k.removeprefix("model.module.") for k in found if k.startswith("model.")}
    buffers = {n for n in names if n.endswith("expert_bias")}
    assert {n.removesuffix("_w").removesuffix("_v") for n in names - buffers} == set(wanted)
    convert(tmp_path / "b", tmp_path / "c", "fsdp_dtensor",
            options=Options(transformer_impl="local", experts="sequential"))  # fmt: skip
    assert differences(load_all(tmp_path / "a" / FOLDER), load_all(tmp_path / "c" / FOLDER)) == []


def test_weights_only_leaves_out_optimizer_scheduler_and_generators(tmp_path: Path) -> None:
    save_fsdp(tmp_path / "a", fsdp_state(Model()))
    convert(tmp_path / "a", tmp_path / "b", "torch_dist", options=Options(weights_only=True))
    convert(tmp_path / "b", tmp_path / "c", "fsdp_dtensor", options=Options(weights_only=True))
    parts = {key.split(".")[0] for key in load_all(tmp_path / "c" / FOLDER)}
    assert parts == {"model", "args", "checkpoint_version", "iteration"}
