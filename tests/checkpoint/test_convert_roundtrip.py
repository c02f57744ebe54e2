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
    llama_config,
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


def converted_config(source: Path, target: Path, **options: object) -> dict:
    convert(source, target, "huggingface", options=Options(**options))  # type: ignore[arg-type]
    return json.loads((target / "config.json").read_text())


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling_is_carried_there_and_back(tmp_path: Path, factor: float, key: str) -> None:
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    hugging_face_folder(tmp_path / "hf", Model(), **{key: scaling}, rope_theta=5e5)
    convert(tmp_path / "hf", tmp_path / "a", "fsdp_dtensor")
    args = load_all(tmp_path / "a" / IMPORTED)["args"]
    assert args.use_rope_scaling is True and args.rope_scaling_factor == factor
    back = converted_config(tmp_path / "a", tmp_path / "back")
    assert back["rope_scaling"] == scaling and back["rope_theta"] == 5e5


@pytest.mark.parametrize("name", ["layernorm_epsilon", "norm_epsilon"])
def test_the_epsilon_of_norms_has_another_name_in_newer_releases(tmp_path: Path, name: str) -> None:
    state = fsdp_state(Model())
    del state["args"].norm_epsilon
    setattr(state["args"], name, 3e-6)
    save_fsdp(tmp_path / "a", state)
    assert converted_config(tmp_path / "a", tmp_path / "hf")["rms_norm_eps"] == 3e-6
    convert(tmp_path / "hf", tmp_path / "b", "fsdp_dtensor")
    assert getattr(load_all(tmp_path / "b" / IMPORTED)["args"], name) == 3e-6


@pytest.mark.parametrize(("experts", "theta"), [(0, 1e4), (2, 1e6)])
def test_what_a_config_leaves_out_is_its_familys(
    tmp_path: Path, experts: int, theta: float
) -> None:
    """`transformers` has other defaults for a Mixtral."""
    hugging_face_folder(tmp_path / "hf", Model(experts=experts))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    del config["rope_theta"], config["rms_norm_eps"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "hf", tmp_path / "a", "fsdp_dtensor")
    args = load_all(tmp_path / "a" / IMPORTED)["args"]
    assert (args.rotary_base, args.norm_epsilon) == (theta, 1e-5 if experts else 1e-6)


def test_a_config_that_is_given_has_the_rows_and_the_dtype_of_the_weights(tmp_path: Path) -> None:
    save_fsdp(tmp_path / "a", fsdp_state(Model()))
    given = tmp_path / "config.json"
    given.write_text(json.dumps(llama_config(Model(), torch_dtype="float16", bos_token_id=7)))
    config = converted_config(
        tmp_path / "a", tmp_path / "hf", hf_config=given, vocab_size=20,
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    assert config == {**llama_config(Model(), bos_token_id=7), "vocab_size": 20,
                      "torch_dtype": "bfloat16"}  # fmt: skip


def test_a_tied_model_whose_file_has_its_head_too_is_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hugging_face_folder(tmp_path / "hf", Model(tied=True))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    convert(tmp_path / "hf", tmp_path / "a", "fsdp_dtensor")
    assert "model.module.output_layer.weight" not in load_all(tmp_path / "a" / IMPORTED)


def test_tensors_without_elements_are_kept(tmp_path: Path) -> None:
    """A list of what was seen, before anything was."""
    state = {**fsdp_state(Model()), "data": {"seen": torch.zeros(0, 3, dtype=torch.int64)}}
    save_fsdp(tmp_path / "a", state)
    convert(tmp_path / "a", tmp_path / "b", "fsdp_dtensor")
    convert(tmp_path / "b", tmp_path / "c", "torch_dist")
    convert(tmp_path / "c", tmp_path / "d", "fsdp_dtensor")
    before = load_all(tmp_path / "a" / FOLDER)
    assert before["data.seen"].shape == (0, 3)
    for name in ("b", "d"):
        assert differences(before, load_all(tmp_path / name / FOLDER)) == []
    report = examine(tmp_path / "b" / FOLDER)
    assert report["intact"] and report["without_digest"] == []


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
