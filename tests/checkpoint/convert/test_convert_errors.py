"""What cannot be converted is one clear error before anything is written."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_fsdp_adapter.checkpoint.convert import convert
from tests.lib.checkpoint.convert_cases import Model, bridge_checkpoint, fsdp_state, save_fsdp

CHECKS = (
    "checkpoint/convert/conversion.py",
    "checkpoint/convert/fsdp_dtensor.py",
    "checkpoint/convert/torch_dist.py",
    "checkpoint/convert/common_state.py",
    "checkpoint/convert/training_state.py",
    "checkpoint/convert/param_groups.py",
)

ITERATION = "iter_0000003"
TRACKER = "latest_checkpointed_iteration.txt"


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


def stored_twice(metadata: Any) -> None:
    metadata.state_dict_metadata["model.module.output_layer.weight"].chunks *= 2


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


def filled(root: Path, *names: str) -> Path:
    """A folder with files of these names, in each a 3."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("3")
    return root


def a_file(root: Path) -> Path:
    root.write_text("x")
    return root


# (name, makes the source, format to convert to, what the message says)
CASES: tuple[tuple[str, Callable[[Path], Path], str, str], ...] = (
    # not there, or of something else
    ("nothing there", lambda r: r, "torch_dist", "does not exist"),
    ("a file", a_file, "torch_dist", "is a file"),
    ("empty folder", lambda r: r.mkdir() or r, "torch_dist", "latest_checkpointed_iteration.txt"),
    (
        "tracker of nothing",
        lambda r: rewritten(fsdp(r) / TRACKER, "9", 0),
        "torch_dist",
        "complete in .*: iteration 3",
    ),
    (
        "tracker without number",
        lambda r: rewritten(fsdp(r) / TRACKER, "x", 0),
        "torch_dist",
        "should hold an iteration number",
    ),
    (
        "legacy format",
        lambda r: filled(r, TRACKER, f"{ITERATION}/mp_rank_00/x.pt"),
        "torch_dist",
        "legacy format.*--ckpt-format torch_dist",
    ),
    (
        "another DCP folder",
        lambda r: save_fsdp(r, {"net": {"w": torch.ones(2)}}),
        "torch_dist",
        "no fsdp_dtensor checkpoint.*net.w",
    ),
    # half-written, truncated, corrupt
    ("no .metadata", lambda r: without(fsdp(r), ".metadata"), "torch_dist", "no .metadata file"),
    (
        "damaged .metadata",
        lambda r: rewritten(fsdp(r) / ITERATION / ".metadata", "x"),
        "torch_dist",
        ".metadata cannot be read",
    ),
    ("no data file", lambda r: without(fsdp(r), "__0_0.distcp"), "torch_dist", "distcp is missing"),
    ("short data file", lambda r: data(fsdp(r), lambda b: b[:-100]), "torch_dist", "bytes"),
    (
        "zeros in data file",
        lambda r: data(fsdp(r), lambda b: bytes(len(b))),
        "torch_dist",
        "args cannot be read|weight cannot be read",
    ),
    (
        "no common.pt",
        lambda r: without(torch_dist(r), "common.pt"),
        "fsdp_dtensor",
        "has no common.pt",
    ),
    (
        "damaged common.pt",
        lambda r: rewritten(torch_dist(r) / ITERATION / "common.pt", "x"),
        "fsdp_dtensor",
        "common.pt cannot be read",
    ),
    (
        "no metadata.json",
        lambda r: without(torch_dist(r), "metadata.json"),
        "fsdp_dtensor",
        "it has no metadata.json",
    ),
    (
        "damaged metadata.json",
        lambda r: rewritten(torch_dist(r) / ITERATION / "metadata.json", "{"),
        "fsdp_dtensor",
        "metadata.json is damaged",
    ),
    (
        "overlapping blocks",
        lambda r: metadata_of(fsdp(r), stored_twice),
        "torch_dist",
        "stored blocks of .*output_layer.weight overlap, or leave a gap",
    ),
    (
        "a path of another key",
        lambda r: metadata_of(fsdp(r), lambda m: m.planner_data.update(iteration=("step",))),
        "torch_dist",
        "iteration is stored under another path.*damaged",
    ),
    # too new, or of another backend
    (
        "newer DCP",
        lambda r: metadata_of(fsdp(r), lambda m: setattr(m, "version", "2.0.0")),
        "torch_dist",
        "version 2.0.0 .* is newer",
    ),
    (
        "newer torch_dist",
        lambda r: rewritten(
            torch_dist(r) / ITERATION / "metadata.json",
            json.dumps(
                {
                    "sharded_backend": "torch_dist",
                    "sharded_backend_version": 2,
                    "common_backend": "torch",
                    "common_backend_version": 1,
                }
            ),
        ),
        "fsdp_dtensor",
        "sharded_backend_version=2, only 1 can be read. A newer",
    ),
    (
        "zarr",
        lambda r: rewritten(
            torch_dist(r) / ITERATION / "metadata.json", json.dumps({"sharded_backend": "zarr"})
        ),
        "fsdp_dtensor",
        "sharded_backend='zarr'",
    ),
    # complete, but does not fit together
    (
        "half a gated weight",
        lambda r: fsdp(r, lambda s: pop_one(s, "weight_v")),
        "torch_dist",
        "weight_w is stored without",
    ),
    (
        "local layer numbers",
        lambda r: fsdp(r, local_layer_numbers),
        "torch_dist",
        "start at 0 on each pipeline stage|which has no weight",
    ),
    (
        "moment of another shape",
        lambda r: fsdp(r, transposed_moment),
        "torch_dist",
        "exp_avg of .* has shape",
    ),
    ("steps differ", lambda r: fsdp(r, two_steps), "torch_dist", "one step count"),
    ("optimizer in buckets", buckets, "fsdp_dtensor", "--dist-ckpt-optim-fully-reshardable"),
    ("group not told", lambda r: common(r, add_group), "fsdp_dtensor", "2 parameter groups"),
    (
        "no groups",
        lambda r: common(r, lambda held: held.pop("optimizer")),
        "fsdp_dtensor",
        "no parameter groups",
    ),
    (
        "no arguments",
        lambda r: common(r, no_arguments),
        "fsdp_dtensor",
        "no training arguments.*run_config.yaml",
    ),
    # Megatron-Bridge's
    (
        "from Hugging Face",
        lambda r: filled(r, "model.safetensors"),
        "fsdp_dtensor",
        "safetensors.*AutoBridge.import_ckpt",
    ),
    *(
        (
            f"run_config.yaml: {text}",
            lambda r, t=text: rewritten(
                bridge_checkpoint(r, Model(), {}) / ITERATION / "run_config.yaml", t
            ),
            "torch_dist",
            rf"run_config\.yaml:? {message}",
        )
        for text, message in (
            ("model: [", "not valid YAML"),
            ("train: {}", "has no section `model`"),
            ("!!python/object/apply:os.getcwd []", "not valid YAML"),
        )
    ),
)


@pytest.mark.parametrize(("name", "make", "to", "message"), CASES, ids=[c[0] for c in CASES])
def test_unusable_input_is_one_clear_error(
    tmp_path: Path, name: str, make: Callable[[Path], Path], to: str, message: str
) -> None:
    source = make(tmp_path / "source")
    target = tmp_path / "target"
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){message}") as caught:
        convert(source, target, to)
    assert not list(tmp_path.glob("target*/iter*")) and not list(tmp_path.glob("target*/*.json"))
    text = str(caught.value)
    assert len(text) < 1500 and str(source) in text
    assert not (target / "latest_checkpointed_iteration.txt").exists()


def test_a_target_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    source = fsdp(tmp_path / "a")
    file = a_file(tmp_path / "b")
    for target, message in ((source, "is not empty"), (file, "is a file")):
        with pytest.raises(ValueError, match=message):
            convert(source, target, "torch_dist")


@pytest.mark.parametrize(
    ("to", "message"),
    [("huggingface", "AutoBridge.export_ckpt"), ("nemo", "one of fsdp_dtensor, torch_dist")],
)
def test_another_format_is_refused_by_name(tmp_path: Path, to: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"format='{to}'.*{message}"):
        convert(tmp_path / "a", tmp_path / "b", to)


def test_buckets_do_not_hinder_a_conversion_of_weights(tmp_path: Path) -> None:
    report = convert(buckets(tmp_path / "a"), tmp_path / "b", "fsdp_dtensor", weights_only=True)
    assert report["tensors"] == 17
