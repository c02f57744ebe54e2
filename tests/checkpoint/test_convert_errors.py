"""What cannot be converted is one clear error before anything is written."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from convert_cases import (
    Model,
    fsdp_state,
    hugging_face_folder,
    save_fsdp,
)
from torch.distributed.checkpoint import FileSystemReader

from megatron_fsdp_adapter.checkpoint.convert import Options, convert

ITERATION = "iter_0000003"


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


def data_file(root: Path) -> Path:
    return next((root / ITERATION).glob("*.distcp"))


def truncated(root: Path) -> Path:
    path = data_file(root)
    path.write_bytes(path.read_bytes()[:-100])
    return root


def flipped(root: Path) -> Path:
    """Bytes of every stored value's own header are wrong."""
    path = data_file(root)
    path.write_bytes(bytes(path.stat().st_size))
    return root


def without(root: Path, name: str) -> Path:
    (root / ITERATION / name).unlink()
    return root


def rewritten(path: Path, text: str) -> Path:
    path.write_text(text)
    return path.parents[1]


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


def strange_objects(state: dict[str, Any]) -> None:
    state["args"].bf16 = False


def buckets(root: Path) -> Path:
    def rename(metadata: Any) -> None:
        stored = metadata.state_dict_metadata
        key = next(key for key in stored if key.startswith("optimizer.state.exp_avg."))
        bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(0).bucket_idx_0.exp_avg"
        stored[bucket] = stored.pop(key)

    return metadata_of(torch_dist(root), rename)


def two_groups(root: Path) -> Path:
    path = torch_dist(root) / ITERATION / "common.pt"
    common = torch.load(path, weights_only=False)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    groups.append({**groups[0], "lr": 7.0})
    torch.save(common, path)
    return root


def no_groups(root: Path) -> Path:
    path = torch_dist(root) / ITERATION / "common.pt"
    common = torch.load(path, weights_only=False)
    del common["optimizer"]
    torch.save(common, path)
    return root


def no_arguments(root: Path) -> Path:
    path = torch_dist(root) / ITERATION / "common.pt"
    common = torch.load(path, weights_only=False)
    del common["args"], common["fsdp_dtensor_names"]
    torch.save(common, path)
    return root


def changed_file(folder: Path, change: Callable[[bytes], bytes]) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    return folder


def hugging_face(root: Path, **changes: Any) -> Path:
    return hugging_face_folder(root, Model(), **changes)


def lost_shard(root: Path) -> Path:
    hugging_face(root)
    weight_map = {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return root


def lost_tensor(root: Path) -> Path:
    hugging_face(root)
    weight_map = {"lm_head.bias": "model.safetensors"}
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
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
    ("tracker of nothing", lambda r: rewritten_tracker(fsdp(r), "9"), "torch_dist",
     "complete in .*: iteration 3"),
    ("tracker without number", lambda r: rewritten_tracker(fsdp(r), "x"), "torch_dist",
     "should hold an iteration number"),
    ("legacy format", legacy, "torch_dist", "legacy format.*--ckpt-format torch_dist"),
    ("another DCP folder", lambda r: save_fsdp(r, {"net": {"w": torch.ones(2)}}), "torch_dist",
     "no fsdp_dtensor checkpoint.*net.w"),
    # half-written, truncated, corrupt
    ("no .metadata", lambda r: without(fsdp(r), ".metadata"), "torch_dist", "no .metadata file"),
    ("damaged .metadata", lambda r: rewritten(fsdp(r) / ITERATION / ".metadata", "x"),
     "torch_dist", ".metadata cannot be read"),
    ("no data file", lambda r: data_file(fsdp(r)).unlink() or r, "torch_dist", "distcp is missing"),
    ("short data file", lambda r: truncated(fsdp(r)), "torch_dist", "bytes"),
    ("zeros in data file", lambda r: flipped(fsdp(r)), "torch_dist", "cannot be read from"),
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
     "weight_w is there without"),
    ("local layer numbers", lambda r: fsdp(r, local_layer_numbers), "torch_dist",
     "start anew on each pipeline stage|which has no weight"),
    ("moment of another shape", lambda r: fsdp(r, transposed_moment), "torch_dist",
     "exp_avg of .* has shape"),
    ("steps differ", lambda r: fsdp(r, two_steps), "torch_dist", "one step count"),
    ("optimizer in buckets", buckets, "fsdp_dtensor", "--dist-ckpt-optim-fully-reshardable"),
    ("group not told", two_groups, "fsdp_dtensor", "2 parameter groups"),
    ("no groups", no_groups, "fsdp_dtensor", "no parameter groups"),
    ("no arguments", no_arguments, "fsdp_dtensor", "--transformer-impl.*--swiglu"),
    ("a weight is missing",
     lambda r: fsdp(r, lambda s: pop_one(s, "layers.0.mlp.linear_fc2.weight")), "huggingface",
     "missing.*fc2|which has no weight"),
    # Hugging Face
    ("truncated safetensors", lambda r: changed_file(hugging_face(r), lambda b: b[:-50]),
     "fsdp_dtensor", "truncated or damaged"),
    ("damaged header", lambda r: changed_file(hugging_face(r), lambda b: b"\xff" * 8 + b[8:]),
     "fsdp_dtensor", "truncated or damaged"),
    ("no config", lambda r: without_file(hugging_face(r), "config.json"), "fsdp_dtensor",
     "config.json"),
    ("no weights", lambda r: without_file(hugging_face(r), "model.safetensors"), "fsdp_dtensor",
     "no \\*.safetensors"),
    ("shard is missing", lost_shard, "fsdp_dtensor", "lacks model-00002-of-00002"),
    ("tensor is missing", lost_tensor, "fsdp_dtensor", "lacks lm_head.bias"),
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
)  # fmt: skip


def rewritten_tracker(root: Path, text: str) -> Path:
    (root / "latest_checkpointed_iteration.txt").write_text(text)
    return root


def without_file(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


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
