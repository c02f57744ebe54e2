"""Uneven DTensors and everything beside them survive a save and load bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_fsdp_adapter.checkpoint.dcp import (
    latest_iteration,
    load_checkpoint,
    save_checkpoint,
)
from megatron_fsdp_adapter.checkpoint.state import flatten, to_stored
from tests.lib.checkpoint.checkpoint_cases import (
    DTYPES,
    collectives_called,
    dtensors_of,
    nested_state,
    numbered_state,
    plan,
    same,
    whole,
)
from tests.lib.ranks.launch import run_ranks

CHECKS = ("checkpoint/dcp.py", "checkpoint/state.py", "core/dtensor/chunks.py")

FOLDER = "iter_0000010"
CUTS = (0, 1)


def _round_trip(rank: int, size: int, root: str, cut: int) -> dict[str, Any]:
    state = nested_state(rank, size, cut=cut)
    save_checkpoint(root, 10, state)
    target = nested_state(rank, size, poison=True, cut=cut)
    locals_before = [tensor._local_tensor for tensor in dtensors_of(target)]
    assert not same(target, state)
    iteration, loaded = load_checkpoint(root, target)
    assert iteration == 10 == latest_iteration(root)
    assert same(loaded, state)
    # In place: what was there before the load sees it, through the objects it had.
    for tensor, before in zip(dtensors_of(target), locals_before, strict=True):
        assert tensor._local_tensor is before
    assert same(dtensors_of(target), dtensors_of(state))
    assert target["iteration"] == 0, "the caller's containers are not changed"
    assert target["opt_param_scheduler"] == {"num_steps": 0}
    assert target["optimizer"]["state"]["fc"]["step"].item() == 3.0
    empty = [tensor for tensor in dtensors_of(state) if tensor._local_tensor.numel() == 0]
    return {"keys": list(flatten(to_stored(state, rank))), "empty": len(empty)}


def _round_trips(rank: int, size: int, root: str) -> list[dict[str, Any]]:
    return [_round_trip(rank, size, f"{root}/{cut}", cut) for cut in CUTS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """A root of four ranks for each cut, and what they found."""
    root = tmp_path_factory.mktemp("four")
    return root, run_ranks(_round_trips, 4, str(root))


@pytest.mark.parametrize("cut", CUTS)
def test_round_trip_is_bit_equal(saved: tuple[Path, Any], cut: int) -> None:
    root, ranks = saved
    outcomes = [rank[cut] for rank in ranks]
    for outcome in outcomes:
        assert outcome["keys"] == outcomes[0]["keys"]
    assert any(outcome["empty"] for outcome in outcomes), "no rank held nothing"
    # The folder is complete by torch DCP's own account: each tensor is stored exactly once.
    metadata = FileSystemReader(root / str(cut) / FOLDER).read_metadata()
    assert set(metadata.state_dict_metadata) == set(outcomes[0]["keys"])


@pytest.mark.parametrize("cut", CUTS)
def test_torch_reads_the_folder_as_whole_tensors(saved: tuple[Path, Any], cut: int) -> None:
    """An independent reader, with plain tensors of the whole shape, finds the whole values."""
    root, _ = saved
    plain = {}
    expected = {}
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        for spec in plan(4, cut=cut).specs:
            name = f"module.{kind}.{spec.fqns[0]}"
            plain[name] = torch.zeros(spec.shape or (1,), dtype=dtype)
            expected[name] = whole(spec.fqns[0], spec.shape, dtype)
    torch.distributed.checkpoint.load(
        {"model": plain}, checkpoint_id=root / str(cut) / FOLDER, no_dist=True
    )
    for name, value in plain.items():
        assert torch.equal(value, expected[name]), name


def test_the_number_of_collectives_does_not_grow_with_tensors(tmp_path: Path) -> None:
    run_ranks(_check_counts, 2, str(tmp_path))


def _check_counts(rank: int, size: int, root: str) -> None:
    tensors = numbered_state(rank, size, 1.0)["model"]
    for copies in (1, 50):
        model = {}
        for number in range(copies):
            for name, tensor in tensors.items():
                model[f"{number}.{name}"] = tensor
        folder = f"{root}/{copies}"
        with collectives_called() as called:
            save_checkpoint(folder, 1, {"model": model})
            assert len(called) == 6, called
            load_checkpoint(folder, {"model": model})
            assert len(called) == 6 + 2, called
