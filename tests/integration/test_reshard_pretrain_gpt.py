"""Megatron-LM's own save and load, unmodified: a checkpoint moves between splits of the model.

Opt-in like `test_pretrain_gpt.py`:

    MEGATRON_LM_PATH=path/to/Megatron-LM python -m pytest --full tests/integration
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.integration import lm_log
from tests.integration.lm_runs import train

pytestmark = pytest.mark.full

# 255 tokens (and one for the end of a document until 0.17): the same padded vocabulary for every
# split.
COMMON = shlex.split(
    "--mock-data --use-megatron-fsdp --num-layers 4 --swiglu --position-embedding-type rope "
    "--disable-bias-linear --vocab-size 255"
)
MOE = shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall"
)
SPLITS = {
    "dp2": [],
    "tp2": shlex.split("--tensor-model-parallel-size 2"),
    "pp2": shlex.split("--pipeline-model-parallel-size 2"),
    "pp2-vpp2": shlex.split(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    ),
    "ep2": shlex.split("--expert-model-parallel-size 2"),
    "zero1": shlex.split("--data-parallel-sharding-strategy optim"),
}
SAVED = 2


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer in a checkpoint, whole, read by torch alone."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and key.startswith(("model.", "optimizer."))
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def _train(checkout: Path, arguments: list[str]) -> lm_log.Values:
    run = train(checkout, arguments, world=2)
    assert run.status == 0, run.end
    return run.values


def _saved(checkout: Path, root: Path, arguments: list[str]) -> Path:
    """The checkpoint of a fresh run after `SAVED` steps."""
    interval = ["--save-interval", str(SAVED), "--exit-interval", str(SAVED)]
    _train(checkout, [*arguments, "--save", str(root), *interval])
    return root / f"iter_{SAVED:07d}"


def _moved(checkout: Path, source: Path, root: Path, arguments: list[str]) -> Path:
    """What a run that loads `source` and takes no step saves."""
    none = ["--train-iters", str(SAVED), "--save-interval", "100", "--eval-iters", "0",
            "--use-checkpoint-opt_param-scheduler"]  # fmt: skip
    _train(checkout, [*arguments, "--load", str(source.parent), "--save", str(root), *none])
    return root / f"iter_{SAVED:07d}"


def _assert_same(one: Path, other: Path) -> None:
    a, b = tensors(one), tensors(other)
    assert set(a) == set(b), sorted(set(a) ^ set(b))
    assert sum(".exp_avg_sq" in key for key in a) > 10
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


@pytest.mark.parametrize("split", ["tp2", "pp2", "pp2-vpp2", "zero1"])
def test_weights_and_optimizer_state_move_there_and_back(
    megatron_lm: Path, tmp_path: Path, split: str
) -> None:
    """Model and optimizer tensors, bit for bit, whole."""
    first = _saved(megatron_lm, tmp_path / "first", COMMON)
    there = _moved(megatron_lm, first, tmp_path / "there", [*COMMON, *SPLITS[split]])
    _assert_same(first, there)
    _assert_same(first, _moved(megatron_lm, there, tmp_path / "back", COMMON))


def test_experts_move_between_ranks(megatron_lm: Path, tmp_path: Path) -> None:
    common = [*COMMON, *MOE]
    first = _saved(megatron_lm, tmp_path / "first", [*common, *SPLITS["ep2"]])
    there = _moved(megatron_lm, first, tmp_path / "there", common)
    _assert_same(first, there)
    back = _moved(megatron_lm, there, tmp_path / "back", [*common, *SPLITS["ep2"]])
    _assert_same(first, back)


@pytest.mark.parametrize("split", ["tp2", "pp2"])
def test_training_goes_on_under_another_split(
    megatron_lm: Path, tmp_path: Path, split: str
) -> None:
    """Gradient norms of the resumed run are those of the run that was never stopped."""
    whole = _train(megatron_lm, COMMON)
    first = _saved(megatron_lm, tmp_path / "first", COMMON)
    resumed = _train(megatron_lm, [*COMMON, *SPLITS[split], "--load", str(first.parent)])
    assert (SAVED, "lm loss") not in resumed, "it started again from the beginning"
    for step in range(SAVED + 1, SAVED + 4):
        ours, expected = float(resumed[step, "grad norm"]), float(whole[step, "grad norm"])
        assert abs(ours - expected) <= 2e-3, (step, ours, expected)


def test_a_vocabulary_with_other_padding_loads(megatron_lm: Path, tmp_path: Path) -> None:
    """257 tokens are padded to 384 rows, with tensor parallelism to 512: the real ones move."""
    common = [*COMMON, "--vocab-size", "257"]
    first = _saved(megatron_lm, tmp_path / "first", common)
    there = _moved(megatron_lm, first, tmp_path / "there", [*common, *SPLITS["tp2"]])
    a, b = tensors(first), tensors(there)
    tables = [key for key in a if a[key].shape != b[key].shape]
    assert len(tables) == 6, tables  # embedding and output layer, each with two moments
    for key in a:
        rows = 257 if key in tables else len(a[key]) if a[key].dim() else None
        assert torch.equal(a[key][:rows] if rows else a[key], b[key][:rows] if rows else b[key])


def test_what_does_not_fit_is_one_error_with_everything(
    megatron_lm: Path, tmp_path: Path
) -> None:
    first = _saved(megatron_lm, tmp_path / "first", COMMON)
    wider = [*COMMON, "--ffn-hidden-size", "96", "--load", str(first.parent)]
    run = train(megatron_lm, wider, world=2)
    assert run.status != 0
    assert "the model does not fit" in run.log
    for layer in range(4):
        assert f"model.module.decoder.layers.{layer}.mlp.linear_fc2.weight: stored" in run.log
