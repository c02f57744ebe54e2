"""Uneven DTensors and everything beside them survive a save and load bit by bit."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import (
    DTYPES,
    data_mesh,
    dtensors_of,
    nested_state,
    plan,
    same,
    sharded_tensors,
    whole,
)
from launch import run_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.checkpoint.dcp import (
    latest_iteration,
    load_checkpoint,
    save_checkpoint,
)
from megatron_fsdp_adapter.checkpoint.state import PerRank, flatten, to_stored


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
    for tensor, expected in zip(dtensors_of(target), dtensors_of(state), strict=True):
        assert torch.equal(tensor._local_tensor, expected._local_tensor)
    assert target["iteration"] == 0, "the caller's containers are not changed"
    assert target["opt_param_scheduler"] == {"num_steps": 0}
    assert target["optimizer"]["state"]["fc"]["step"].item() == 3.0
    return {
        "keys": list(flatten(to_stored(state, rank))),
        "empty": sum(t._local_tensor.numel() == 0 for t in dtensors_of(state)),
    }


@pytest.mark.parametrize(("size", "cut"), [(2, 0), (4, 0), (4, 1)])
def test_round_trip_is_bit_equal(tmp_path: Path, size: int, cut: int) -> None:
    outcomes = run_ranks(_round_trip, size, str(tmp_path), cut)
    assert all(outcome["keys"] == outcomes[0]["keys"] for outcome in outcomes)
    assert size == 2 or any(outcome["empty"] for outcome in outcomes), "no rank held nothing"
    # The folder is complete by torch DCP's own account: each tensor is stored exactly once.
    metadata = FileSystemReader(tmp_path / "iter_0000010").read_metadata()
    assert set(metadata.state_dict_metadata) == set(outcomes[0]["keys"])


def test_round_trip_alone_without_a_launcher(one_rank: None, tmp_path: Path) -> None:
    outcome = _round_trip(0, 1, str(tmp_path), 0)
    assert outcome["empty"] == 0


def test_torch_reads_the_folder_as_whole_tensors(tmp_path: Path) -> None:
    """An independent reader, with plain tensors of the whole shape, finds the whole values."""
    run_ranks(_save_only, 4, str(tmp_path))
    plain = {
        f"{dtype}.{spec.fqns[0]}": torch.zeros(spec.shape or (1,), dtype=dtype)
        for dtype in DTYPES
        for spec in plan(4).specs
    }
    torch.distributed.checkpoint.load(
        {"model": plain}, checkpoint_id=tmp_path / "iter_0000003", no_dist=True
    )
    for dtype in DTYPES:
        for spec in plan(4).specs:
            expected = whole(spec.fqns[0], spec.shape, dtype)
            assert torch.equal(plain[f"{dtype}.{spec.fqns[0]}"], expected)


def _save_only(rank: int, size: int, root: str) -> None:
    layout, mesh = plan(size), data_mesh(size)
    model = {
        f"{dtype}.{name}": tensor
        for dtype in DTYPES
        for name, tensor in sharded_tensors(layout, rank, mesh, dtype).items()
    }
    save_checkpoint(root, 3, {"model": model})


def test_another_number_of_ranks_loads_the_same_values(tmp_path: Path) -> None:
    run_ranks(_save_only, 4, str(tmp_path))
    run_ranks(_load_and_compare, 2, str(tmp_path))


def _load_and_compare(rank: int, size: int, root: str) -> None:
    layout, mesh = plan(size), data_mesh(size)
    wanted = {dtype: sharded_tensors(layout, rank, mesh, dtype) for dtype in DTYPES}
    target = {
        f"{dtype}.{name}": tensor
        for dtype in DTYPES
        for name, tensor in sharded_tensors(layout, rank, mesh, dtype, poison=True).items()
    }
    load_checkpoint(root, {"model": target}, iteration=3)
    for dtype, tensors in wanted.items():
        for name, tensor in tensors.items():
            assert same(target[f"{dtype}.{name}"], tensor), (dtype, name)


def test_per_rank_values_come_back_per_rank(tmp_path: Path) -> None:
    run_ranks(_per_rank, 2, str(tmp_path))


def _per_rank(rank: int, size: int, root: str) -> None:
    torch.manual_seed(100 + rank)
    rng = {"torch": torch.get_rng_state(), "number": rank, "list": [torch.tensor([rank])]}
    expected = torch.rand(4)
    torch.manual_seed(100 + rank)
    state = {"rng_state": PerRank(rng), "args": Namespace(lr=0.1), "shared": [1, {"a": (2, 3)}]}
    state["deep"] = {"er": [{"own": PerRank(-rank), "t": torch.ones(1)}]}
    save_checkpoint(root, 1, state)
    target = {"rng_state": PerRank(), "args": None, "shared": [0, {"a": None}]}
    target["deep"] = {"er": [{"own": PerRank(), "t": torch.zeros(1)}]}
    _, loaded = load_checkpoint(root, target)
    assert loaded["rng_state"]["number"] == rank
    assert loaded["rng_state"]["list"][0].item() == rank
    torch.manual_seed(0)
    torch.set_rng_state(loaded["rng_state"]["torch"])
    assert torch.equal(torch.rand(4), expected)
    assert loaded["args"] == Namespace(lr=0.1)
    assert loaded["shared"] == [1, {"a": (2, 3)}]
    assert loaded["deep"]["er"][0] == {"own": -rank, "t": torch.ones(1)}


def test_the_number_of_collectives_does_not_grow_with_tensors(tmp_path: Path) -> None:
    counts = run_ranks(_count_collectives, 2, str(tmp_path))
    for few, many in counts:
        assert few == many
    assert counts[0][0] == {"save": 6, "load": 2}


def _count_collectives(rank: int, size: int, root: str) -> list[dict[str, int]]:
    return [_count(rank, size, f"{root}/{n}", n) for n in (1, 50)]


COLLECTIVES = (
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("all_gather", "all_reduce", "broadcast", "barrier", "all_to_all", "gather", "scatter"),
)


def _count(rank: int, size: int, root: str, copies: int) -> dict[str, int]:
    calls: list[str] = []
    depth = 0

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            if depth == 1:  # an object collective is made of tensor collectives; count it once
                calls.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1

        return call

    layout, mesh = plan(size), data_mesh(size)
    model = {
        f"{i}.{name}": tensor
        for i in range(copies)
        for name, tensor in sharded_tensors(layout, rank, mesh, torch.float32).items()
    }
    counts = {}
    patches = {name: counted(name) for name in COLLECTIVES}
    with patch.multiple(dist, **patches):
        save_checkpoint(root, 1, {"model": model})
        counts["save"] = len(calls)
        calls.clear()
        load_checkpoint(root, {"model": model})
        counts["load"] = len(calls)
    return counts


def test_a_replicated_dtensor_needs_no_chunks(one_rank: None, tmp_path: Path) -> None:
    from torch.distributed.tensor import Replicate

    mesh = data_mesh(1)
    tensor = DTensor.from_local(torch.arange(6.0), mesh, [Replicate()])
    save_checkpoint(tmp_path, 1, {"w": tensor})
    target = DTensor.from_local(torch.zeros(6), mesh, [Replicate()])
    load_checkpoint(tmp_path, {"w": target})
    assert torch.equal(target.to_local(), torch.arange(6.0))
