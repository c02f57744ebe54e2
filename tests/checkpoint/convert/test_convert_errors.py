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


Make = Callable[[Path], Path]
CASES: list[Any] = []
"""Parameters: a function that makes the source, the format to convert to, what the error says."""


def case(name: str, to: str, message: str) -> Callable[[Make], Make]:
    """Makes a row of `CASES` of the function below it."""

    def add(make: Make) -> Make:
        CASES.append(pytest.param(make, to, message, id=name))
        return make

    return add


# not there, or of something else


@case("nothing there", "torch_dist", "does not exist")
def _nothing_there(root: Path) -> Path:
    return root


@case("a file", "torch_dist", "is a file")
def _a_file(root: Path) -> Path:
    return a_file(root)


@case("empty folder", "torch_dist", "latest_checkpointed_iteration.txt")
def _empty_folder(root: Path) -> Path:
    root.mkdir()
    return root


@case("tracker of nothing", "torch_dist", "complete in .*: iteration 3")
def _tracker_of_nothing(root: Path) -> Path:
    fsdp(root)
    return rewritten(root / TRACKER, "9", 0)


@case("tracker without number", "torch_dist", "should hold an iteration number")
def _tracker_without_number(root: Path) -> Path:
    fsdp(root)
    return rewritten(root / TRACKER, "x", 0)


@case("legacy format", "torch_dist", "legacy format.*--ckpt-format torch_dist")
def _legacy_format(root: Path) -> Path:
    return filled(root, TRACKER, f"{ITERATION}/mp_rank_00/x.pt")


@case("another DCP folder", "torch_dist", "no fsdp_dtensor checkpoint.*net.w")
def _another_dcp_folder(root: Path) -> Path:
    return save_fsdp(root, {"net": {"w": torch.ones(2)}})


# half-written, truncated, corrupt


@case("a bit of a tensor", "torch_dist", "is damaged: .*distcp: differs from its digest")
def _a_bit_of_a_tensor(root: Path) -> Path:
    convert(torch_dist(root.with_name("second")), root, "fsdp_dtensor")
    return data(root, lambda content: content[:-1] + bytes([content[-1] ^ 1]))


@case("no .metadata", "torch_dist", "no .metadata file")
def _no_metadata(root: Path) -> Path:
    fsdp(root)
    return without(root, ".metadata")


@case("damaged .metadata", "torch_dist", ".metadata cannot be read")
def _damaged_metadata(root: Path) -> Path:
    fsdp(root)
    return rewritten(root / ITERATION / ".metadata", "x")


@case("no data file", "torch_dist", "distcp is missing")
def _no_data_file(root: Path) -> Path:
    fsdp(root)
    return without(root, "__0_0.distcp")


@case("short data file", "torch_dist", "bytes")
def _short_data_file(root: Path) -> Path:
    fsdp(root)
    return data(root, lambda b: b[:-100])


@case("zeros in data file", "torch_dist", "args cannot be read|weight cannot be read")
def _zeros_in_data_file(root: Path) -> Path:
    fsdp(root)
    return data(root, lambda b: bytes(len(b)))


@case("no common.pt", "fsdp_dtensor", "has no common.pt")
def _no_common_pt(root: Path) -> Path:
    torch_dist(root)
    return without(root, "common.pt")


@case("damaged common.pt", "fsdp_dtensor", "common.pt cannot be read")
def _damaged_common_pt(root: Path) -> Path:
    torch_dist(root)
    return rewritten(root / ITERATION / "common.pt", "x")


@case("no metadata.json", "fsdp_dtensor", "it has no metadata.json")
def _no_metadata_json(root: Path) -> Path:
    torch_dist(root)
    return without(root, "metadata.json")


@case("damaged metadata.json", "fsdp_dtensor", "metadata.json is damaged")
def _damaged_metadata_json(root: Path) -> Path:
    torch_dist(root)
    return rewritten(root / ITERATION / "metadata.json", "{")


@case(
    "overlapping blocks",
    "torch_dist",
    "stored blocks of .*output_layer.weight overlap, or leave a gap",
)
def _overlapping_blocks(root: Path) -> Path:
    fsdp(root)
    return metadata_of(root, stored_twice)


@case("a path of another key", "torch_dist", "iteration is stored under another path.*damaged")
def _a_path_of_another_key(root: Path) -> Path:
    fsdp(root)
    return metadata_of(root, lambda m: m.planner_data.update(iteration=("step",)))


# too new, or of another backend


@case("newer DCP", "torch_dist", "version 2.0.0 .* is newer")
def _newer_dcp(root: Path) -> Path:
    fsdp(root)
    return metadata_of(root, lambda m: setattr(m, "version", "2.0.0"))


@case("newer torch_dist", "fsdp_dtensor", "sharded_backend_version=2, only 1 can be read. A newer")
def _newer_torch_dist(root: Path) -> Path:
    return rewritten(
        torch_dist(root) / ITERATION / "metadata.json",
        json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 2,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        ),
    )


@case("zarr", "fsdp_dtensor", "sharded_backend='zarr'")
def _zarr(root: Path) -> Path:
    return rewritten(
        torch_dist(root) / ITERATION / "metadata.json", json.dumps({"sharded_backend": "zarr"})
    )


# complete, but does not fit together


@case("half a gated weight", "torch_dist", "weight_w is stored without")
def _half_a_gated_weight(root: Path) -> Path:
    return fsdp(root, lambda s: pop_one(s, "weight_v"))


@case("local layer numbers", "torch_dist", "start at 0 on each pipeline stage|which has no weight")
def _local_layer_numbers(root: Path) -> Path:
    return fsdp(root, local_layer_numbers)


@case("moment of another shape", "torch_dist", "exp_avg of .* has shape")
def _moment_of_another_shape(root: Path) -> Path:
    return fsdp(root, transposed_moment)


@case("steps differ", "torch_dist", "one step count")
def _steps_differ(root: Path) -> Path:
    return fsdp(root, two_steps)


@case("optimizer in buckets", "fsdp_dtensor", "--dist-ckpt-optim-fully-reshardable")
def _optimizer_in_buckets(root: Path) -> Path:
    return buckets(root)


@case("group not told", "fsdp_dtensor", "2 parameter groups")
def _group_not_told(root: Path) -> Path:
    return common(root, add_group)


@case("no groups", "fsdp_dtensor", "no parameter groups")
def _no_groups(root: Path) -> Path:
    return common(root, lambda held: held.pop("optimizer"))


@case("no arguments", "fsdp_dtensor", "no training arguments.*run_config.yaml")
def _no_arguments(root: Path) -> Path:
    return common(root, no_arguments)


# Megatron-Bridge's


@case("from Hugging Face", "fsdp_dtensor", "safetensors.*AutoBridge.import_ckpt")
def _from_hugging_face(root: Path) -> Path:
    return filled(root, "model.safetensors")


for text, message in (
    ("model: [", "not valid YAML"),
    ("train: {}", "has no section `model`"),
    ("!!python/object/apply:os.getcwd []", "not valid YAML"),
):

    @case(f"run_config.yaml: {text}", "torch_dist", rf"run_config\.yaml:? {message}")
    def _run_config(root: Path, text: str = text) -> Path:
        bridge_checkpoint(root, Model(), {})
        return rewritten(root / ITERATION / "run_config.yaml", text)


@pytest.mark.parametrize(("make", "to", "message"), CASES)
def test_unusable_input_is_one_clear_error(
    tmp_path: Path, make: Make, to: str, message: str
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
    [
        ("huggingface", "AutoBridge.export_ckpt"),
        ("safetensors", "AutoBridge.export_ckpt"),
        ("nemo", "one of fsdp_dtensor, torch_dist"),
    ],
)
def test_another_format_is_refused_by_name(tmp_path: Path, to: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"format='{to}' \(--to\): .*{message}"):
        convert(tmp_path / "a", tmp_path / "b", to)


def test_buckets_do_not_hinder_a_conversion_of_weights(tmp_path: Path) -> None:
    report = convert(buckets(tmp_path / "a"), tmp_path / "b", "fsdp_dtensor", weights_only=True)
    assert report["tensors"] == 17
