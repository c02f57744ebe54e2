"""What cannot be converted is one clear error before anything is written."""

from __future__ import annotations

import json
import pickle
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_cases import (
    Model,
    fsdp_state,
    hugging_face_folder,
    llama_config,
    save_fsdp,
)
from test_convert_run_config import bridge_checkpoint, config
from torch.distributed.checkpoint import FileSystemReader

from megatron_fsdp_adapter.checkpoint.convert import Options, convert

ITERATION, TRACKER = "iter_0000003", "latest_checkpointed_iteration.txt"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def fsdp(root: Path, change: Callable[[dict[str, Any]], Any] = lambda state: None) -> Path:
    state = fsdp_state(Model())
    change(state)
    return save_fsdp(root, state)


def torch_dist(root: Path) -> Path:
    fsdp(root.with_name("first"))
    convert(root.with_name("first"), root, "torch_dist")
    return root


def metadata_of(root: Path, change: Callable[[Any], Any]) -> Path:
    folder = root / ITERATION
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return root


def data(root: Path, change: Callable[[bytes], bytes]) -> Path:
    path = next((root / ITERATION).glob("*.distcp"))
    path.write_bytes(change(path.read_bytes()))
    return root


def without(root: Path, name: str, folder: str = ITERATION) -> Path:
    (root / folder / name).unlink()
    return root


def rewritten(path: Path, text: str, depth: int = 1) -> Path:
    """The root, of a file so many folders below it."""
    path.write_text(text)
    return path.parents[depth]


def pop_one(state: dict[str, Any], end: str) -> None:
    del state["model"][next(key for key in state["model"] if key.endswith(end))]


def two_steps(state: dict[str, Any]) -> None:
    first = next(iter(state["optimizer"]["state"].values()))
    first["step"] = torch.tensor(4.0)


def local_layer_numbers(state: dict[str, Any]) -> None:
    """As a second pipeline stage whose layers count from zero again leaves it: half of them."""
    for key in [key for key in state["model"] if "layers.1." in key]:
        del state["model"][key]


def transposed_moment(state: dict[str, Any]) -> None:
    entry = next(v for k, v in state["optimizer"]["state"].items() if k.endswith("fc2.weight"))
    entry["exp_avg"] = entry["exp_avg"].T.contiguous()


def buckets(root: Path) -> Path:
    def rename(metadata: Any) -> None:
        stored = metadata.state_dict_metadata
        key = next(key for key in stored if key.startswith("optimizer.state.exp_avg."))
        bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(0).bucket_idx_0.exp_avg"
        stored[bucket] = stored.pop(key)
        places = metadata.storage_data
        for index in [index for index in places if index.fqn == key]:
            places[replace(index, fqn=bucket)] = places.pop(index)

    return metadata_of(torch_dist(root), rename)


def common(root: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A torch_dist folder whose common state is another one."""
    path = torch_dist(root) / ITERATION / "common.pt"
    held = torch.load(path, weights_only=False)
    change(held)
    torch.save(held, path)
    return root


def add_group(held: dict[str, Any]) -> None:
    groups = held["optimizer"]["optimizer"]["param_groups"]
    groups.append({**groups[0], "lr": 7.0})


def no_arguments(held: dict[str, Any]) -> None:
    del held["args"], held["fsdp_dtensor_names"]


def changed_file(folder: Path, change: Callable[[bytes], bytes]) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    return folder


def hugging_face(root: Path, **changes: Any) -> Path:
    return hugging_face_folder(root, Model(), **changes)


def indexed(root: Path, file: Any, name: str = "lm_head.weight") -> Path:
    """Whose index says that the tensor is in `file`, which is there where a path leads out."""
    hugging_face(root)
    (root.parent / "elsewhere.safetensors").write_bytes((root / "model.safetensors").read_bytes())
    text = json.dumps({"weight_map": {name: file}})
    (root / "model.safetensors.index.json").write_text(text)
    return root


def saying(root: Path, experts: int = 0, **changes: Any) -> Path:
    """A checkpoint whose arguments say so."""
    state = fsdp_state(Model(experts=experts))
    state["model"] = {k: v for k, v in state["model"].items() if "expert_bias" not in k}
    vars(state["args"]).update(changes)
    return save_fsdp(root, state)


def tied_beside_a_head(root: Path, value: float) -> Path:
    """As `transformers` 4 ignores it, and 5 does not where values differ."""
    from safetensors.torch import load_file, save_file

    hugging_face(root, tie_word_embeddings=True)
    tensors = load_file(root / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + value
    save_file(tensors, root / "model.safetensors")
    return root


def of_bridge(root: Path, text: str = "", **changes: Any) -> Path:
    """A checkpoint of Megatron-Bridge whose run_config.yaml says so."""
    described = config(Model())
    described["model"].update(changes)
    bridge_checkpoint(root, Model(), described)
    if text:
        (root / ITERATION / "run_config.yaml").write_text(text)
    return root


def a_file(root: Path) -> Path:
    root.write_text("x")
    return root


def legacy(root: Path) -> Path:
    (root / ITERATION / "mp_rank_00").mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    return root


# (name, makes the source, format to convert to, what the message says)
CASES: tuple[tuple[str, Callable[[Path], Path], str, str], ...] = (
    # not there, or of something else
    ("nothing there", lambda r: r, "torch_dist", "does not exist"),
    ("a file", a_file, "torch_dist", "is a file"),
    ("empty folder", lambda r: r.mkdir() or r, "torch_dist", "latest_checkpointed_iteration.txt"),
    ("tracker of nothing", lambda r: rewritten(fsdp(r) / TRACKER, "9", 0), "torch_dist",
     "complete in .*: iteration 3"),
    ("tracker without number", lambda r: rewritten(fsdp(r) / TRACKER, "x", 0), "torch_dist",
     "should hold an iteration number"),
    ("legacy format", legacy, "torch_dist", "legacy format.*--ckpt-format torch_dist"),
    ("another DCP folder", lambda r: save_fsdp(r, {"net": {"w": torch.ones(2)}}), "torch_dist",
     "no fsdp_dtensor checkpoint.*net.w"),
    # half-written, truncated, corrupt
    ("no .metadata", lambda r: without(fsdp(r), ".metadata"), "torch_dist", "no .metadata file"),
    ("damaged .metadata", lambda r: rewritten(fsdp(r) / ITERATION / ".metadata", "x"),
     "torch_dist", ".metadata cannot be read"),
    ("no data file", lambda r: without(fsdp(r), "__0_0.distcp"), "torch_dist", "distcp is missing"),
    ("short data file", lambda r: data(fsdp(r), lambda b: b[:-100]), "torch_dist", "bytes"),
    ("zeros in data file", lambda r: data(fsdp(r), lambda b: bytes(len(b))), "torch_dist",
     "cannot be read from"),
    ("no common.pt", lambda r: without(torch_dist(r), "common.pt"), "fsdp_dtensor",
     "has no common.pt"),
    ("damaged common.pt", lambda r: rewritten(torch_dist(r) / ITERATION / "common.pt", "x"),
     "fsdp_dtensor", "common.pt cannot be read"),
    ("no metadata.json", lambda r: without(torch_dist(r), "metadata.json"), "fsdp_dtensor",
     "it has no metadata.json"),
    ("damaged metadata.json", lambda r: rewritten(torch_dist(r) / ITERATION / "metadata.json", "{"),
     "fsdp_dtensor", "metadata.json is damaged"),
    # too new, or of another backend
    ("newer DCP", lambda r: metadata_of(fsdp(r), lambda m: setattr(m, "version", "2.0.0")),
     "torch_dist", "version 2.0.0 .* is newer"),
    ("newer torch_dist",
     lambda r: rewritten(torch_dist(r) / ITERATION / "metadata.json", json.dumps(
         {"sharded_backend": "torch_dist", "sharded_backend_version": 2,
          "common_backend": "torch", "common_backend_version": 1})),
     "fsdp_dtensor", "sharded_backend_version=2 is newer"),
    ("zarr", lambda r: rewritten(torch_dist(r) / ITERATION / "metadata.json",
                                 json.dumps({"sharded_backend": "zarr"})),
     "fsdp_dtensor", "sharded_backend='zarr'"),
    # complete, but does not fit together
    ("half a gated weight", lambda r: fsdp(r, lambda s: pop_one(s, "weight_v")), "torch_dist",
     "weight_w is stored without"),
    ("local layer numbers", lambda r: fsdp(r, local_layer_numbers), "torch_dist",
     "start at 0 on each pipeline stage|which has no weight"),
    ("moment of another shape", lambda r: fsdp(r, transposed_moment), "torch_dist",
     "exp_avg of .* has shape"),
    ("steps differ", lambda r: fsdp(r, two_steps), "torch_dist", "one step count"),
    ("optimizer in buckets", buckets, "fsdp_dtensor", "--dist-ckpt-optim-fully-reshardable"),
    ("group not told", lambda r: common(r, add_group), "fsdp_dtensor", "2 parameter groups"),
    ("no groups", lambda r: common(r, lambda held: held.pop("optimizer")), "fsdp_dtensor",
     "no parameter groups"),
    ("no arguments", lambda r: common(r, no_arguments), "fsdp_dtensor",
     "--transformer-impl.*--swiglu"),
    ("a weight is missing",
     lambda r: fsdp(r, lambda s: pop_one(s, "layers.0.mlp.linear_fc2.weight")), "huggingface",
     "missing.*fc2|which has no weight"),
    # Hugging Face
    ("truncated safetensors", lambda r: changed_file(hugging_face(r), lambda b: b[:-50]),
     "fsdp_dtensor", "truncated or damaged"),
    ("damaged header", lambda r: changed_file(hugging_face(r), lambda b: b"\xff" * 8 + b[8:]),
     "fsdp_dtensor", "truncated or damaged"),
    ("no config", lambda r: without(hugging_face(r), "config.json", ""), "fsdp_dtensor",
     "config.json"),
    ("no weights", lambda r: without(hugging_face(r), "model.safetensors", ""), "fsdp_dtensor",
     "no \\*.safetensors"),
    ("shard is missing", lambda r: indexed(r, "model-00002-of-00002.safetensors"), "fsdp_dtensor",
     "lacks model-00002-of-00002"),
    ("tensor is missing", lambda r: indexed(r, "model.safetensors", "lm_head.bias"), "fsdp_dtensor",
     "lacks lm_head.bias"),
    ("another family", lambda r: hugging_face(r, model_type="gpt2"), "fsdp_dtensor",
     "model_type='gpt2'.*llama, mixtral"),
    ("no such layer", lambda r: hugging_face(r, num_hidden_layers=3), "fsdp_dtensor",
     "missing.*layers.2"),
    ("a layer too many", lambda r: hugging_face(r, num_hidden_layers=1), "fsdp_dtensor",
     "without a counterpart.*layers.1"),
    ("another width", lambda r: hugging_face(r, intermediate_size=13), "fsdp_dtensor",
     "not \\(13, 16\\)"),
    ("another number of groups", lambda r: hugging_face(r, num_key_value_heads=4), "fsdp_dtensor",
     "k_proj"),
    ("tied and another head", lambda r: tied_beside_a_head(r, 0.5), "fsdp_dtensor",
     "tie_word_embeddings=True.*lm_head.weight of other values"),
    ("index leads out", lambda r: indexed(r, "../elsewhere.safetensors"), "fsdp_dtensor",
     "'../elsewhere.safetensors', which is no file of this folder"),
    ("index has a path", lambda r: indexed(r, str(r.parent / "elsewhere.safetensors")),
     "fsdp_dtensor", "elsewhere.safetensors', which is no file of this folder"),
    ("index has a number", lambda r: indexed(r, 7), "fsdp_dtensor", "to 7, which is no file"),
    # computes what core's model would not
    *((f"config: {name}={value}", lambda r, n=name, v=value: hugging_face(r, **{n: v}),
       "fsdp_dtensor", message) for name, value, message in (
        ("hidden_act", "gelu_pytorch_tanh", "hidden_act='gelu_pytorch_tanh' \\(not 'silu'\\)"),
        ("attention_bias", True, "attention_bias=True"),
        ("mlp_bias", True, "mlp_bias=True"),
        ("sliding_window", 16, "sliding_window=16"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor=0.5"),
        ("quantization_config", {"bits": 4}, "quantization_config="),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type='linear'"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "rope_type='yarn'"),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4}, "rope_type='dynamic'"),
        ("rope_scaling", {**LLAMA3, "low_freq_factor": 2.0}, "low_freq_factor=2.0 \\(not 1.0\\)"),
        ("rope_scaling", {**LLAMA3, "original_max_position_embeddings": 4096},
         "original_max_position_embeddings=4096 \\(not 8192\\)"),
    )),
    # is neither a Llama nor a Mixtral
    *((f"argument: {name}={value}",
       lambda r, n=name, v=value, e=experts: saying(r, e, **{n: v}), "huggingface",
       f"{name}={re.escape(repr(value))}.*{message}") for name, value, experts, message in (
        ("layernorm_zero_centered_gamma", True, 0, "neither a Llama nor a Mixtral"),
        ("apply_layernorm_1p", True, 0, "neither"),
        ("rotary_seq_len_interpolation_factor", 4, 0, "neither"),
        ("window_size", (128, 0), 0, "neither"),
        ("use_mup", True, 0, "neither"),
        ("softmax_scale", 0.5, 0, "neither"),
        ("apply_residual_connection_post_layernorm", True, 0, "neither"),
        ("spec", ["my.module", "my_spec"], 0, "neither"),
        ("activation_func", "torch.nn.functional.gelu", 0, "neither"),
        ("moe_router_pre_softmax", True, 2, "neither"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"], 2, "neither"),
        ("embedding_multiplier", 4.0, 0, "unknown arguments.*--hf-config"),
    )),
    *((f"run_config.yaml: {name}={value}", lambda r, n=name, v=value: of_bridge(r, **{n: v}),
       "huggingface", message) for name, value, message in (
        ("activation_func", {"_call_": False, "_target_": "torch.nn.functional.gelu"},
         "activation_func='torch.nn.functional.gelu'"),
        ("layernorm_zero_centered_gamma", True, "layernorm_zero_centered_gamma=True"),
        ("seq_len_interpolation_factor", 4.0, "seq_len_interpolation_factor=4.0"),
        ("_target_", "megatron.bridge.models.gemma.gemma_provider.GemmaModelProvider",
         "_target_='megatron.bridge.models.gemma"),
        ("scale_factor", 8.0, "scale_factor=8.0: .*--hf-config"),
    )),
    *((f"run_config.yaml: {text}", lambda r, t=text: of_bridge(r, t), "huggingface",
       rf"run_config\.yaml:? .*{message}|run_config\.yaml {message}") for text, message in (
        ("model: [", "not valid YAML"), ("train: {}", "has no section `model`"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML"),
    )),
    ("a factor that Megatron-LM ignores",
     lambda r: saying(r, use_rope_scaling=True, rope_scaling_factor=32.0,
                      rotary_seq_len_interpolation_factor=None),
     "huggingface", "rope_scaling_factor=32.0.*computes with 8.0.*--hf-config"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "make", "to", "message"), CASES, ids=[c[0] for c in CASES])
def test_unusable_input_is_one_clear_error(
    tmp_path: Path, name: str, make: Callable[[Path], Path], to: str, message: str
) -> None:
    source, target = make(tmp_path / "source"), tmp_path / "target"
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){message}") as caught:
        convert(source, target, to)
    assert not list(tmp_path.glob("target*/iter*")) and not list(tmp_path.glob("target*/*.json"))
    text = str(caught.value)
    assert len(text) < 1500 and str(source) in text
    assert not (target / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize(
    ("experts", "changes"),
    [
        (0, {"window_size": [-1, 0], "rotary_seq_len_interpolation_factor": 1.0}),
        (0, {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5}),
        (2, {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}),
        (0, {"activation_func": torch.nn.functional.silu, "exit_signal": signal.SIGTERM}),
        (0, {"my_tool_is_on": False, "micro_batch_size": 4, "attention_dropout": 0.1}),
    ],
)
def test_arguments_without_effect_are_no_obstacle(
    tmp_path: Path, experts: int, changes: dict[str, Any]
) -> None:
    report = convert(saying(tmp_path / "a", experts, **changes), tmp_path / "b", "huggingface")
    assert report.dropped == ("everything but weights",)


def test_what_training_does_to_tokens_of_experts_is_reported(tmp_path: Path) -> None:
    source = saying(tmp_path / "a", 2, moe_expert_capacity_factor=1.25, moe_input_jitter_eps=0.01)
    assert convert(source, tmp_path / "b", "huggingface").dropped == (
        "everything but weights", "moe_expert_capacity_factor=1.25", "moe_input_jitter_eps=0.01"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 2, "head_dim": 8, "num_key_value_heads": 1},
         "num_attention_heads=4 .the config: 2.*num_query_groups=2 .the config: 1.*kv_channels=4"),
        ({"rms_norm_eps": 1e-2}, "norm_epsilon=1e-05 .the config: 0.01"),
        ({"rope_theta": 5e5}, "rotary_base=10000.0 .the config: 500000.0"),
        ({"rope_scaling": LLAMA3}, "rope_scaling_factor=None .the config: 8.0"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({}, None),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_the_arguments_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    source = saying(tmp_path / "a", rotary_base=10000, use_rope_scaling=False, unheard_of=1)
    (tmp_path / "config.json").write_text(json.dumps(llama_config(Model(), **changes)))
    options = Options(hf_config=tmp_path / "config.json")
    if message is None:
        convert(source, tmp_path / "b", "huggingface", options=options)
        return
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "b", "huggingface", options=options)
    assert not (tmp_path / "b").exists()


def test_a_target_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    fsdp(tmp_path / "a")
    for format in ("torch_dist", "huggingface"):
        with pytest.raises(ValueError, match="is not empty"):
            convert(tmp_path / "a", tmp_path / "a", format)
    a_file(tmp_path / "b")
    with pytest.raises(ValueError, match="is a file"):
        convert(tmp_path / "a", tmp_path / "b", "torch_dist")


BAD_OPTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"transformer_impl": "inference"}, "transformer_impl='inference' must be one of local"),
    ({"experts": "legacy"}, "experts='legacy'"),
    ({"block_bytes": 0}, "block_bytes=0"),
    ({"vocab_size": -1}, "vocab_size=-1"),
)


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_a_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)


def test_more_rows_than_there_are_cannot_be_kept(tmp_path: Path) -> None:
    fsdp(tmp_path / "a")
    with pytest.raises(ValueError, match="vocab_size=25, but the embedding has 24 rows"):
        convert(tmp_path / "a", tmp_path / "b", "huggingface", options=Options(vocab_size=25))
    hugging_face(tmp_path / "hf")
    with pytest.raises(ValueError, match="padded_vocab_size=8 is less than vocab_size=24"):
        convert(tmp_path / "hf", tmp_path / "c", "fsdp_dtensor",
                options=Options(padded_vocab_size=8))  # fmt: skip


def test_buckets_do_not_hinder_a_conversion_of_weights(tmp_path: Path) -> None:
    options = Options(weights_only=True)
    report = convert(buckets(tmp_path / "a"), tmp_path / "b", "fsdp_dtensor", options=options)
    assert report.tensors == 17
    assert convert(tmp_path / "a", tmp_path / "c", "huggingface").tensors == 21
