"""Megatron's own SwiGLU split, with our helpers in the places of the originals.

Core's `handle_swiglu_in_state_dict` turns each first MLP weight into its gate and value halves,
`<key>_w` and `<key>_v`, which are views of the sharded values: a load writes through them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import plan, shard, whole
from launch import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp_adapter.checkpoint.chunks import (
    LayoutRef,
    copy_chunks,
    dtensor_like,
    read_chunks,
    uneven_dtensor,
)
from megatron_fsdp_adapter.checkpoint.dcp import load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.megatron.checkpoint import megatron_names

# Halves of one tensor-parallel slice. The bias is smaller than a shard of the group.
HALVES = {"decoder.layers.0.mlp.linear_fc1.weight": (5, 4), "x.mlp.linear_fc1.bias": (5,)}
OTHER = {"decoder.layers.0.mlp.linear_fc2.weight": (4, 5)}
MOMENTS = ("exp_avg", "exp_avg_sq")


class _Index:
    """What core's split asks of a wrapper's index of groups."""

    tp_dim = "tp"

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def get_submesh(self, names: Any, is_expert_parallel: bool = False) -> DeviceMesh:
        (name,) = [names] if isinstance(names, str) else names
        return self.mesh[name]


class _Model:
    """A model of sharded parameters, found by the names that core's split uses."""

    config = SimpleNamespace(num_moe_experts=None)

    def __init__(self, params: dict[str, torch.nn.Parameter]) -> None:
        self.params = params

    def get_parameter(self, name: str) -> torch.nn.Parameter:
        return self.params[name.removeprefix("module.module.")]

    def named_modules(self) -> list[tuple[str, torch.nn.Module]]:
        """From 0.18 on core looks for layers, and takes all weights for gated where it has none."""
        return []


def _full(name: str, half: str) -> torch.Tensor:
    """The whole half, over all (two at most) tensor-parallel ranks."""
    rows, *rest = HALVES[name]
    return whole(f"{name}{half}", (2 * rows, *rest), torch.float32)


def _slice_of(name: str, tp_rank: int, suffix: str = "") -> torch.Tensor:
    """This tensor-parallel rank's parameter: its rows of the gate, then its rows of the value."""
    rows = HALVES[name][0]
    own = slice(tp_rank * rows, (tp_rank + 1) * rows)
    return torch.cat([_full(name, f"_w{suffix}")[own], _full(name, f"_v{suffix}")[own]])


def _param(
    ref: LayoutRef, mesh: DeviceMesh, tp_size: int, value: torch.Tensor
) -> torch.nn.Parameter:
    held = ref.layout.shard_range(ref.index, ref.rank)
    local = value.reshape(-1)[held.start : held.stop].clone()
    local = local.view(ref.layout.local_shape(ref.index, ref.rank))
    shape = (value.shape[0] * tp_size, *value.shape[1:])
    stride = torch.empty(shape).stride()
    # As the wrapper does without tensor parallelism: DTensors on the data-parallel axis alone.
    on = mesh if tp_size > 1 else mesh["dp_cp"]
    placements = [Shard(0)] * on.ndim
    tensor = uneven_dtensor(local, on, placements, shape, stride, ref.chunks())
    param = torch.nn.Parameter(tensor)
    copy_chunks(tensor, param)
    for name, attribute in {
        "megatron_fsdp_slice": slice(held.start, held.stop),
        "megatron_fsdp_dist_index": _Index(mesh),
        "fsdp_layout_ref": ref,
        "tensor_model_parallel": tp_size > 1,
        "partition_dim": 0,
        "partition_stride": 1,
    }.items():
        setattr(param, name, attribute)
    return param


def _build(mesh: DeviceMesh, dp_size: int, tp_size: int) -> tuple[_Model, dict[str, Any]]:
    tp_rank = mesh.get_local_rank("tp")
    shapes = {name: (2 * rows, *rest) for name, (rows, *rest) in HALVES.items()} | OTHER
    layout = plan(dp_size, shapes)
    params, state = {}, {}
    for index, (name, shape) in enumerate(shapes.items()):
        at = (tp_rank * shape[0], *[0] * (len(shape) - 1))
        ref = LayoutRef(layout, index, mesh.get_local_rank("dp_cp"), at)
        split = name in HALVES

        def value(suffix: str = "", name: str = name, split: bool = split) -> torch.Tensor:
            if split:
                return _slice_of(name, tp_rank, suffix)
            both = whole(f"{name}{suffix}", (2 * OTHER[name][0], *OTHER[name][1:]), torch.float32)
            return both.chunk(2)[tp_rank]

        params[name] = _param(ref, mesh, tp_size, value())
        state[name] = {
            "step": torch.tensor(3.0),
            **{m: dtensor_like(params[name], _like(params[name], ref, value(m))) for m in MOMENTS},
        }
    return _Model(params), state


def _like(param: torch.nn.Parameter, ref: LayoutRef, value: torch.Tensor) -> torch.Tensor:
    held = ref.layout.shard_range(ref.index, ref.rank)
    local = value.reshape(-1)[held.start : held.stop].clone()
    return local.view(param._local_tensor.shape)  # type: ignore[attr-defined]


def _split(model: _Model, optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """Core's function, as Megatron-LM's checkpointing calls it."""
    from megatron.core.transformer import fsdp_dtensor_checkpoint as core

    values = {}
    for name, param in model.params.items():
        values[f"module.{name}"] = param.detach()
        copy_chunks(param, values[f"module.{name}"])
    optimizer = {
        "state": {f"module.module.module.{n}": dict(s) for n, s in optimizer_state.items()},
        "param_to_group_meta": {},
    }
    names = (
        "make_fsdp_dtensor",
        "is_mcore_tensor_model_parallel",
        "get_mcore_tensor_parallel_partition_dim",
        "copy_tensor_model_parallel_attributes",
    )
    with patch.multiple(core, **{name: getattr(megatron_names, name) for name in names}):
        model_state, optimizer = core.handle_swiglu_in_state_dict(model, values, optimizer)
    state = {"model": model_state, "optimizer": optimizer}
    return megatron_names.preprocess_state_dict_for_uneven_dtensor(state)


def _forbidden(*_: Any, **__: Any) -> None:
    raise AssertionError("the split communicates")


def _round_trip(rank: int, size: int, root: str, tp_size: int) -> list[str]:
    from megatron.core import parallel_state

    # Core's split asks it for the expert-parallel rank, with or without experts.
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size)
    dp_size = size // tp_size
    mesh = init_device_mesh("cpu", (dp_size, tp_size), mesh_dim_names=("dp_cp", "tp"))
    model, moments = _build(mesh, dp_size, tp_size)
    state = _split(model, moments)
    silent = dict.fromkeys(("all_gather_object", "all_gather", "all_reduce"), _forbidden)
    with patch.multiple(dist, **silent):
        _split(model, moments)
    save_checkpoint(root, 1, state)
    expected = {name: param._local_tensor.clone() for name, param in model.params.items()}
    for param in model.params.values():
        param._local_tensor.fill_(-5)
    for entry in moments.values():
        for moment in MOMENTS:
            entry[moment]._local_tensor.fill_(-5)
    _, loaded = load_checkpoint(root, state)
    reference, reference_moments = _build(mesh, dp_size, tp_size)
    for name, param in model.params.items():
        assert torch.equal(param._local_tensor, expected[name]), name
        assert torch.equal(param._local_tensor, reference.params[name]._local_tensor), name
        for moment in MOMENTS:
            own = moments[name][moment]._local_tensor
            assert torch.equal(own, reference_moments[name][moment]._local_tensor), (name, moment)
    return list(loaded["model"])


# Three shards: the middle one holds the end of one half and the start of the other.
@pytest.mark.parametrize(("size", "tp_size"), [(3, 1), (4, 2)])
def test_split_save_load(tmp_path: Path, size: int, tp_size: int) -> None:
    keys = run_ranks(_round_trip, size, str(tmp_path), tp_size)
    assert all(own == keys[0] for own in keys)
    names = [f"module.{name}_{half}" for name in HALVES for half in "wv"]
    assert sorted(keys[0]) == sorted([*names, *(f"module.{name}" for name in OTHER)])
    # Read back whole by torch alone: the halves of all tensor-parallel ranks in one tensor.
    scale = tp_size
    plain: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for name, (rows, *rest) in HALVES.items():
        for half in ("_w", "_v"):
            plain["model"][f"module.{name}{half}"] = torch.zeros(scale * rows, *rest)
            entry = {m: torch.zeros(scale * rows, *rest) for m in MOMENTS}
            plain["optimizer"]["state"][f"module.module.module.{name}{half}"] = entry
    torch.distributed.checkpoint.load(plain, checkpoint_id=tmp_path / "iter_0000001", no_dist=True)
    for name, (rows, *_) in HALVES.items():
        for half in ("_w", "_v"):
            value = plain["model"][f"module.{name}{half}"]
            assert torch.equal(value, _full(name, half)[: scale * rows]), (name, half)
            for moment in MOMENTS:
                value = plain["optimizer"]["state"][f"module.module.module.{name}{half}"][moment]
                assert torch.equal(value, _full(name, f"{half}{moment}")[: scale * rows])


def _meta_pieces(param: DTensor) -> tuple[torch.Tensor, torch.Tensor]:
    halves = torch.chunk(torch.empty(param.shape, device="meta"), 2)
    for half in halves:
        megatron_names.copy_tensor_model_parallel_attributes(half, param)
    return halves


def _one_param() -> torch.nn.Parameter:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_cp", "tp"))
    value = torch.arange(40.0).view(10, 4)
    return _param(LayoutRef(plan(1, {"w": (10, 4)}), 0, 0), mesh, 1, value)


def test_pieces_are_views_with_their_place(one_rank: None) -> None:
    param = _one_param()
    w, v = _meta_pieces(param)
    flat = param._local_tensor.view(-1)
    piece = megatron_names.make_fsdp_dtensor(
        flat[20:].view(5, 4).data, v, dist_index=None, run_check=True
    )
    assert tuple(piece.shape) == (5, 4) and read_chunks(piece) == (((0, 0), (5, 4)),)
    piece._local_tensor.fill_(-1)
    assert bool((param._local_tensor[5:] == -1).all())
    with pytest.raises(ValueError, match="was given 16"):
        megatron_names.make_fsdp_dtensor(flat[:16].view(4, 4), w, dist_index=None)


@pytest.mark.parametrize(
    "option", [{"is_sharded_param": False}, {"force_sync_tp_duplicated_param": True}]
)
def test_options_that_nobody_passes_are_refused(one_rank: None, option: dict[str, bool]) -> None:
    w, _ = _meta_pieces(_one_param())
    with pytest.raises(ValueError, match=next(iter(option))):
        megatron_names.make_fsdp_dtensor(torch.zeros(5, 4), w, dist_index=None, **option)


def test_a_parameter_of_another_engine_is_refused(one_rank: None) -> None:
    with pytest.raises(ValueError, match=r"uninstall\(\)"):
        megatron_names.make_fsdp_dtensor(
            torch.zeros(5, 4), torch.empty(5, 4, device="meta"), dist_index=None
        )


def test_preprocess_names_what_has_no_chunks(one_rank: None) -> None:
    param = _one_param()
    lost = DTensor(param._local_tensor, param._spec, requires_grad=False)
    state = {"model": {"good": param.detach(), "lost": lost, "plain": torch.zeros(2)}}
    with pytest.raises(ValueError, match=r"1 sharded DTensors carry no chunks: model\.lost;"):
        megatron_names.preprocess_state_dict_for_uneven_dtensor(state)
    del state["model"]["lost"]
    assert megatron_names.preprocess_state_dict_for_uneven_dtensor(state) is state


def _gather_all(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp_cp", "tp"))
    model, _ = _build(mesh, 2, size // 2)
    for name, param in model.params.items():
        result = megatron_names.gather_uneven_dtensor_to_full_tensor(param)
        expected = (
            torch.cat([_slice_of(name, t) for t in range(size // 2)])
            if name in HALVES
            else whole(name, (2 * OTHER[name][0], *OTHER[name][1:]), torch.float32)
        )
        assert torch.equal(result.to_local(), expected), name
        later_name = megatron_names.redistribute_uneven_dtensor_to_replicated(param)
        assert torch.equal(later_name.to_local(), expected)
        assert torch.equal(megatron_names.uneven_dtensor_to_full_tensor(param), expected)
        assert all(placement.is_replicate() for placement in result.placements)
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_cp",))
    for dtype in (torch.bfloat16, torch.bool, torch.int16):
        layout = plan(size)
        for index, spec in enumerate(layout.specs):
            ref = LayoutRef(layout, index, rank)
            full = whole(spec.fqns[0], spec.shape, dtype)
            result = megatron_names.gather_uneven_dtensor_to_full_tensor(shard(ref, line, full))
            assert torch.equal(result.to_local(), full), spec
    # Split evenly by torch itself, and bits that an addition of floats would lose.
    odd = torch.tensor([-0.0, float("nan"), float("-inf"), 1e-45, 3.0])
    even = torch.distributed.tensor.distribute_tensor(odd, line, [Shard(0)])
    result = megatron_names.gather_uneven_dtensor_to_full_tensor(even).to_local()
    assert torch.equal(result.view(torch.int32), odd.view(torch.int32))
    rows = 3 if rank == 0 else 1
    shape = (size + 2, 2)
    lost = DTensor.from_local(torch.zeros(rows, 2), line, [Shard(0)], shape=shape, stride=(2, 1))
    if rank == 0:
        with pytest.raises(ValueError, match="carries no chunks"):
            megatron_names.gather_uneven_dtensor_to_full_tensor(lost)


def test_gather_uneven_dtensor_to_full_tensor() -> None:
    run_ranks(_gather_all, 4)


def test_gather_refuses_another_device(one_rank: None) -> None:
    with pytest.raises(ValueError, match="target_device=meta"):
        megatron_names.gather_uneven_dtensor_to_full_tensor(_one_param(), torch.device("meta"))
    with pytest.raises(ValueError, match="not a DTensor"):
        megatron_names.gather_uneven_dtensor_to_full_tensor(torch.zeros(2))
    with pytest.raises(ValueError, match="not a DTensor"):
        megatron_names.uneven_dtensor_to_full_tensor(torch.zeros(2))


def test_tensor_parallel_attributes() -> None:
    plain, split, fixed = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    split.tensor_model_parallel, split.partition_dim = True, 1
    fixed._mcore_tp, fixed._tp_partition_dim, fixed.partition_dim = True, 0, -1
    dims = megatron_names.get_mcore_tensor_parallel_partition_dim
    assert [dims(p) for p in (plain, split, fixed)] == [None, 1, 0]
    assert not megatron_names.is_mcore_tensor_model_parallel(plain)
