"""Uneven DTensors for the checkpoint tests, with values that depend on their name alone."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves

from megatron_fsdp_adapter.checkpoint import storage
from megatron_fsdp_adapter.core.dtensor.blocks import Chunks
from megatron_fsdp_adapter.core.dtensor.chunks import LayoutRef
from megatron_fsdp_adapter.core.dtensor.uneven import UnevenDTensor
from megatron_fsdp_adapter.core.layout import GroupLayout, ParamSpec, plan_group, row_granularity
from megatron_fsdp_adapter.core.layout.ranges import Box

# Uneven rows, a parameter smaller than any shard, one row, three dimensions, a scalar.
SHAPES = {
    "embedding": (13, 6),
    "norm": (3,),
    "row": (1, 4),
    "conv": (2, 3, 2),
    "scale": (),
    "fc": (7, 5),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.bool)


def plan(num_shards: int, shapes: dict[str, tuple[int, ...]] = SHAPES, cut: int = 0) -> GroupLayout:
    """A layout of the shapes by rows, or by elements if cut=1."""
    specs = []
    for i, (name, shape) in enumerate(shapes.items()):
        specs.append(
            ParamSpec(i, (name,), shape, torch.float32, True, cut or row_granularity(shape))
        )
    return plan_group(specs, num_shards, align=1)


def data_mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("dp_cp",))


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits with a seed from the name: any corruption or swap of tensors shows."""
    seed = int.from_bytes(hashlib.sha256(f"{name}{dtype}".encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-1000, 1000, shape or (1,), generator=generator)
    if dtype != torch.bool:
        return raw.to(dtype)
    return raw % 2 == 0


def uneven_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    boxes: tuple[Box, ...],
) -> UnevenDTensor:
    """Of blocks. A scalar is a row of one, as with sharded parameters."""
    if not shape:
        local = local.reshape(-1)
        shape = (1,)
        stride = (1,)
    return UnevenDTensor.over(local, mesh, placements, shape, stride, Chunks(boxes))


def shard(ref: LayoutRef, mesh: DeviceMesh, full: torch.Tensor) -> DTensor:
    """This rank's piece of `full` as a sharded parameter would hold it."""
    held = ref.layout.shard_range(ref.index, ref.rank)
    local = full.reshape(-1)[held.start : held.stop].clone()
    local = local.view(ref.layout.local_shape(ref.index, ref.rank))
    shape = ref.layout.specs[ref.index].shape
    return uneven_dtensor(local, mesh, [Shard(0)], shape, torch.empty(shape).stride(), ref.chunks())


def sharded_tensors(
    layout: GroupLayout, rank: int, mesh: DeviceMesh, dtype: torch.dtype, poison: bool = False
) -> dict[str, DTensor]:
    """One DTensor for each parameter of the layout; poisoned ones hold nothing of the values."""
    tensors = {}
    for index, spec in enumerate(layout.specs):
        name = spec.fqns[0]
        full = whole(name, spec.shape, dtype)
        if dtype == torch.bool:
            poisoned = ~full
        else:
            poisoned = full + 1
        value = poisoned if poison else full
        tensors[name] = shard(LayoutRef(layout, index, rank), mesh, value)
    return tensors


def numbered_state(rank: int, size: int, number: float) -> dict[str, Any]:
    """A state whose tensors hold `number`, which is beside them too."""
    tensors = sharded_tensors(plan(size), rank, data_mesh(size), torch.float32)
    for tensor in tensors.values():
        tensor._local_tensor.fill_(number)
    return {"model": tensors, "number": number}


def nested_state(rank: int, size: int, poison: bool = False, cut: int = 0) -> dict[str, Any]:
    """A state in the shape of Megatron's, DTensors of every dtype, plain tensors and objects."""
    layout = plan(size, cut=cut)
    mesh = data_mesh(size)
    state: dict[str, Any] = {
        "model": {
            f"module.{str(dtype).removeprefix('torch.')}.{name}": tensor
            for dtype in DTYPES
            for name, tensor in sharded_tensors(layout, rank, mesh, dtype, poison).items()
        },
        "optimizer": {"state": {}, "param_to_group_meta": {}},
    }
    for name, moment in sharded_tensors(layout, rank, mesh, torch.float32, poison).items():
        step = torch.tensor(-1.0 if poison else 3.0)
        state["optimizer"]["state"][name] = {"exp_avg": moment, "step": step}
        state["optimizer"]["param_to_group_meta"][name] = {"lr": 0.0 if poison else 1e-3}
    state["iteration"] = 0 if poison else 10
    state["opt_param_scheduler"] = {"num_steps": 0 if poison else 320}
    return state


def dtensors_of(value: Any) -> list[DTensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, DTensor)]


def same(a: Any, b: Any) -> bool:
    """Bit equality of two nested states and their types, DTensors by their local tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, DTensor):
        return a.shape == b.shape and same(a._local_tensor, b._local_tensor)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    return bool(a == b)


def names(root: str | Path) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir())


class Gate:
    """Holds this rank's writing of data files back until it is opened. fails: it raises then."""

    def __init__(self, fails: bool = False) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        original = storage._write_file

        def write(*args: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            if fails:
                raise OSError(28, "No space left on device")
            return original(*args)

        storage._write_file = write


COLLECTIVES = (
    "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list",
    "all_gather", "all_reduce", "broadcast", "barrier", "all_to_all", "gather", "scatter",
)  # fmt: skip


@contextmanager
def collectives_called() -> Iterator[list[tuple[str, bool]]]:
    """Collectives as they are called, by any thread, and whether on the group of all ranks. Those
    of tensors that one of objects is made of are not listed."""
    called: list[tuple[str, bool]] = []

    def listed(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            group = options.get("group") or dist.group.WORLD
            called.append((name, group is dist.group.WORLD))
            return original(*args, **options)

        return call

    patches = {name: listed(name, getattr(dist, name)) for name in COLLECTIVES}
    with mock.patch.multiple(dist, **patches):
        yield called
