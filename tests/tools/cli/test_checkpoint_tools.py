"""The commands convert, inspect and diff: what they print, as text and JSON, and exit statuses."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron_fsdp_adapter.__main__ import main
from megatron_fsdp_adapter.checkpoint.record import write_record
from megatron_fsdp_adapter.tools.cli import convert as convert_command
from tests.lib.checkpoint.convert_cases import Model, fsdp_state, save_fsdp

CHECKS = (
    "tools/cli/convert.py",
    "tools/cli/inspect.py",
    "tools/cli/diff.py",
    "tools/inspection.py",
    "tools/cli/output.py",
    "tools/progress.py",
)

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_fsdp(tmp_path / "saved", fsdp_state(Model(experts=2)))


def changed(root: Path, **changes: float) -> Path:
    """The same checkpoint with other values: the first element of a key, by key."""
    state = fsdp_state(Model(experts=2))
    for name, value in changes.items():
        weight = state["model"][f"module.{name}.weight"]
        weight[0, 0] = value
    return save_fsdp(root, state)


LAYER = "decoder.layers.1.self_attention.linear_qkv"
TOLD: dict[str, tuple[str, int, tuple[str, ...], tuple[str, ...], str]] = {
    "convert": (
        "convert SAVED TMP/td --to torch_dist", 0,
        ("fsdp_dtensor -> torch_dist: TMP/td/iter_0000003", "iteration 3, "), (), ""),
    "convert of nothing": (
        "convert TMP/no TMP/x --to torch_dist", 2, (), (),
        "convert: TMP/no does not exist. Check the path\n"),
    "a target that cannot be made": (
        "convert SAVED SAVED/latest_checkpointed_iteration.txt/out --to torch_dist", 2, (), (),
        "convert: .*SAVED/latest_checkpointed_iteration.txt.*\n"),
    "inspect": (
        "inspect SAVED", 0,
        ("fsdp_dtensor, iteration 3", "world_size", "num_experts", "weights", "optimizer"),
        ("linear_qkv",), ""),
    "inspect of some keys": (
        "inspect SAVED --keys --match layers.1.self_attention", 0,
        (f"model.module.{LAYER}.weight", "32x16",
         f"optimizer.state.module.module.module.{LAYER}.weight.exp_avg_sq"),
        ("layers.0.", "param_to_group_meta"), ""),
    "inspect of no checkpoint": (
        "inspect TMP", 2, (), (),
        "inspect: .*latest_checkpointed_iteration.txt does not exist.*\n"),
    "diff of the same": ("diff SAVED SAVED", 0, ("diff: the same\n",), (), ""),
    "verify of nothing": ("verify TMP/nowhere", 2, (), (), "verify: .*nowhere does not exist.*\n"),
    "verify of no such iteration": (
        "verify SAVED --iteration 7", 2, (), (), "verify: .*iter_0000007 does not exist.*\n"),
    "verify of another iteration": (
        "verify SAVED/iter_0000003 --iteration 2", 2, (), (),
        "verify: .*is iteration 3, not 2.*\n"),
}  # fmt: skip
"""Words, status, what is printed and what not, and a pattern of what stderr has: no progress
without a terminal."""


@pytest.mark.parametrize("name", TOLD)
def test_what_a_command_tells(name: str, saved: Path, tmp_path: Path, capsys: Captured) -> None:
    words, status, printed, absent, error = TOLD[name]

    def put(text: str) -> str:
        with_folder = text.replace("SAVED", str(saved))
        return with_folder.replace("TMP", str(tmp_path))

    assert main(put(words).split()) == status
    found = capsys.readouterr()
    for one in printed:
        assert put(one) in found.out, found.out
    for one in absent:
        assert one not in found.out, found.out
    assert re.fullmatch(put(error), found.err), found.err
    if name == "convert":
        assert (tmp_path / "td" / "iter_0000003" / "common.pt").is_file()


def test_plain_folders_of_dcp_are_read(tmp_path: Path, capsys: Captured) -> None:
    """As an FSDP2 program saves: names of its own, and no layout of Megatron."""

    def saved_state(name: str, first: float) -> str:
        weight = torch.arange(6.0).view(2, 3)
        weight[0, 0] = first
        state = {"app": {"model": {"w": weight}, "optim": {"state": {"w.exp_avg": weight + 1}}}}
        dcp.save({**state, "step": 7}, checkpoint_id=tmp_path / name)
        return str(tmp_path / name)

    one, same, other = saved_state("one", 0.0), saved_state("same", 0.0), saved_state("other", 5.0)
    assert main(["inspect", one, "--keys"]) == 0
    text = capsys.readouterr().out
    assert f"{one}: dcp\n" in text
    assert re.search(r"weights +1 keys +6 elements", text)
    assert re.search(r"optimizer +1 keys +6 elements", text)
    assert re.search(r"app\.model\.w +2x3 +float32", text)
    assert main(["diff", one, same]) == 0
    assert main(["diff", one, other]) == 1
    assert "app.model.w: 1 of 6 elements, by at most 5" in capsys.readouterr().out
    assert main(["verify", one]) == 2
    assert "has no digests.json: another program" in capsys.readouterr().err
    assert main(["inspect", one, "--iteration", "3"]) == 2
    assert "has no iterations" in capsys.readouterr().err


def test_convert_says_nothing_of_what_megatron_misses(saved: Path, tmp_path: Path) -> None:
    """Before: warnings of Megatron's imports, in front of the report."""
    environment = dict(os.environ)
    environment.pop("PYTHONWARNINGS", None)
    words = ["convert", str(saved), str(tmp_path / "td"), "--to", "torch_dist"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fsdp_adapter", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr
    assert done.stdout.startswith("fsdp_dtensor -> torch_dist: ")


def report(capsys: Captured, *words: object, status: int = 0) -> Any:
    """What a command prints as JSON, and nothing else."""
    assert main([*map(str, words), "--json"]) == status
    found = capsys.readouterr()
    assert found.err == ""
    return json.loads(found.out)


def test_convert_prints_json(saved: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    found = report(capsys, "convert", saved, out, "--to", "torch_dist")
    assert found["source_format"] == "fsdp_dtensor"
    assert found["iteration"] == 3
    assert main(["inspect", str(out), "--keys", "--match", "layer_norm_w"]) == 0
    assert "linear_qkv.layer_norm_weight" in capsys.readouterr().out


def test_inspect_as_json_has_every_key_and_what_the_save_itself_noted(
    saved: Path, capsys: Captured
) -> None:
    found = report(capsys, "inspect", saved / "iter_0000003")
    assert found["saved_by"]["world_size"] == 2
    assert found["saved_by"]["processes that wrote files"]
    assert found["model"]["num_layers"] == 2
    entries = {entry.pop("key"): entry for entry in found["entries"]}
    embedding = entries["model.module.embedding.word_embeddings.weight"]
    assert embedding["shape"] == [24, 16]
    assert embedding["dtype"] == "float32"
    assert embedding["nbytes"] == 24 * 16 * 4
    assert embedding["part"] == "weights"
    assert entries["args"]["shape"] is None
    assert entries["args"]["nbytes"] > 0
    weights = fsdp_state(Model(experts=2))["model"].values()
    elements = sum(tensor.numel() for tensor in weights)
    assert found["totals"]["weights"]["elements"] == elements

    write_record(saved / "iter_0000003", 8, 3, {"tensor_model_parallel_size": 4})
    noted = report(capsys, "inspect", saved)["saved_by"]
    assert noted["world_size"] == 8
    assert noted["tensor_model_parallel_size"] == 4
    assert noted["saved_at"].endswith("+00:00")
    assert noted["torch"] == torch.__version__


def test_diff_finds_one_element(saved: Path, tmp_path: Path, capsys: Captured) -> None:
    projection = "decoder.layers.1.self_attention.linear_proj"
    other = changed(tmp_path / "b", **{projection: 100.0})
    found = report(capsys, "diff", saved, other, status=1)
    assert found["different"]
    [value] = found["values"]
    assert value["key"] == f"model.module.{projection}.weight"
    assert value["differing"] == 1
    assert 90 < value["largest"] < 110
    assert main(["diff", str(saved), str(other), "--no-values"]) == 0

    # By common names too, though one of them is of another format.
    converted = str(tmp_path / "td")
    assert main(["convert", str(saved), converted, "--to", "torch_dist"]) == 0
    assert main(["diff", converted, str(other)]) == 1
    assert f"weights.{projection}.weight: 1 of" in capsys.readouterr().out
    assert main(["diff", converted, str(saved)]) == 0


def test_diff_tells_a_sign_of_zero_and_nan_from_their_bits(tmp_path: Path) -> None:
    from megatron_fsdp_adapter.tools.inspection import diff

    def save(name: str, values: list[float]) -> Path:
        return save_fsdp(tmp_path / name, {"model": {"module.w": torch.tensor(values)}})

    nan = save("a", [math.nan, 0.0])
    same = save("b", [math.nan, 0.0])
    other = save("c", [math.nan, -0.0])
    assert not any(diff(nan, same).values())
    found = diff(nan, other)
    assert found["values"][0]["differing"] == 1


def test_diff_lists_keys_shapes_dtypes_and_objects(tmp_path: Path, capsys: Captured) -> None:
    def save(name: str, **state: object) -> str:
        weights = {"module.x": torch.ones(1)}
        root = save_fsdp(tmp_path / name, {"model": weights, **state})
        return str(root)

    two = torch.ones(2)
    a = save("a", only=two, s=two, d=two, o=1)
    b = save("b", new=two, s=torch.ones(3), d=two.double(), o=2)
    assert main(["diff", a, b]) == 1
    text = capsys.readouterr().out
    for line in (
        "only in A (1)\n  only",
        "only in B (1)\n  new",
        "s: (2,), (3,)",
        "d: float32, float64",
        "objects with other values (1)\n  o",
    ):
        assert line in text, text
    assert text.splitlines()[-1] == "diff: they differ (above)"


def test_what_is_not_converted_is_one_line_for_all_optimizer_state() -> None:
    report = {
        "source_format": "torch_dist",
        "target_format": "fsdp_dtensor",
        "folder": "to/iter_0000005",
        "iteration": 5,
        "tensors": 1,
        "nbytes": 4,
        "dropped": ["optimizer.a/shard_0_1", "rng_state", "optimizer.b/shard_0_1"],
    }
    last = convert_command.render(report).splitlines()[-1]
    assert last == "not converted: rng_state, optimizer state (2 entries)"
