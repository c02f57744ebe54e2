"""There and back between formats is the identity, bit for bit; and the formats are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def trip(root: Path, source: Any, *steps: tuple[str, Options]) -> list[dict[str, Any]]:
    """Converts a state of fsdp_dtensor, or the folder root/0, to root/1, 2, ... step by step; all
    that is in each folder."""
    from safetensors.torch import load_file

    if source is not None:
        save_fsdp(root / "0", source)
    found = []
    for number, (to, options) in enumerate((("", Options()), *steps)):
        folder = root / str(number)
        if number:
            report = convert(root / str(number - 1), folder, to, options=options)
            assert to == "huggingface" or report.dropped == ()
        files = list(folder.glob("*.safetensors"))
        found.append(
            {k: v for file in files for k, v in load_file(file).items()}
            if files else load_all(next(folder.glob("iter_*")))
        )  # fmt: skip
    return found


@pytest.mark.parametrize("name", NAMES)
def test_to_torch_dist_and_back_is_the_identity(tmp_path: Path, name: str) -> None:
    """With a tensor without elements, as a list of what was seen has before anything was."""
    state = {**fsdp_state(MODELS[name]), "data": {"seen": torch.zeros(0, 3, dtype=torch.int64)}}
    small = Options(block_bytes=SMALL)
    formats = ("fsdp_dtensor", "torch_dist", "fsdp_dtensor")
    before, same, _, after = trip(tmp_path, state, *((to, small) for to in formats))
    assert detect_format(tmp_path / "2") == "torch_dist"
    assert len(before) > 100 and before["data.seen"].shape == (0, 3)
    assert differences(before, same) == differences(before, after) == []
    for root in (tmp_path / "1", tmp_path / "3"):
        assert (root / "latest_checkpointed_iteration.txt").read_text() == "3"
        report = examine(root / FOLDER)
        assert report["intact"] and report["without_digest"] == []


@pytest.mark.parametrize("name", NAMES)
def test_torch_dist_stacks_layers_and_experts_and_rounds_what_the_model_computes_in(
    tmp_path: Path, name: str
) -> None:
    model = MODELS[name]
    state = fsdp_state(model)
    found = trip(tmp_path, state, ("torch_dist", Options()))[-1]
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


@pytest.mark.parametrize(("experts", "rows"), [(0, VOCAB), (2, VOCAB), (0, 40)])
@pytest.mark.parametrize("through", ["torch_dist", "fsdp_dtensor"])
def test_hugging_face_there_and_back(
    tmp_path: Path, experts: int, rows: int, through: str
) -> None:
    """Any format goes into any other, without a third folder in between; rows of padding are added
    as zeros, and cut off again."""
    hugging_face_folder(tmp_path / "0", Model(experts=experts))
    there = Options(make_vocab_size_divisible_by=20 if rows > VOCAB else 1, block_bytes=SMALL)
    back = Options(vocab_size=VOCAB, block_bytes=SMALL)
    before, found, after = trip(tmp_path, None, (through, there), ("huggingface", back))
    assert differences(before, after) == []
    prefix = "model.module." if through == "fsdp_dtensor" else ""
    for name in ("embedding.word_embeddings", "output_layer"):
        table = found[f"{prefix}{name}.weight"]
        assert table.shape == (rows, HIDDEN) and not table[VOCAB:].any() and table[:VOCAB].any()


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


def test_modules_of_another_kind_get_other_names_and_the_same_values(tmp_path: Path) -> None:
    """Core's layers with one module per expert, to Transformer Engine's with grouped experts."""
    local = Model(experts=4)
    before, found, after = trip(
        tmp_path, fsdp_state(local),
        ("fsdp_dtensor", Options(transformer_impl="transformer_engine", experts="grouped")),
        ("fsdp_dtensor", Options(transformer_impl="local", experts="sequential")),
    )  # fmt: skip
    wanted = shapes(local.but(te=True, grouped=True))
    names = {k.removeprefix("model.module.") for k in found if k.startswith("model.")}
    buffers = {n for n in names if n.endswith("expert_bias")}
    assert {n.removesuffix("_w").removesuffix("_v") for n in names - buffers} == set(wanted)
    assert differences(before, after) == []


def test_weights_only_leaves_out_optimizer_scheduler_and_generators(tmp_path: Path) -> None:
    only = Options(weights_only=True)
    found = trip(tmp_path, fsdp_state(Model()), ("torch_dist", only), ("fsdp_dtensor", only))[-1]
    parts = {key.split(".")[0] for key in found}
    assert parts == {"model", "args", "checkpoint_version", "iteration"}
