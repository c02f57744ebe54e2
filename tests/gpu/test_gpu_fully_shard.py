"""`fully_shard` beside torch's function, at real width: losses and norms of steps, with gather
extensions of torchao too, on 2 ranks; replicas and tensor parallelism on 4; and memory while a
model is being sharded."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_adapter import fully_shard as ours
from tests.lib.gpu import shared_device
from tests.lib.gpu.gpu_ranks import Check, Outcomes, expecting

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fsdp2_times import SHAPES, VOCAB, Layer, Model

CHECKS = (
    "plain/fsdp2.py",
    "plain/sharded_params.py",
    "core/engine/rows_buffer.py",
    "core/engine/extensions.py",
    "core/engine/tensor_parallel.py",
)

SHAPE = SHAPES["8b"]
LAYERS = 2
STEPS = 3
NEAR = 2e-3
"""Relative, of losses and norms whose kernels or sums are in other orders."""
Shards = Callable[..., Any]
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ALL_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)


class Recomputing(Layer):
    """A layer that keeps its inputs alone for its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Row:
    """A model, how it is sharded and trained."""

    policy: MixedPrecisionPolicy = BF16
    microbatches: int = 1
    recomputes: bool = False
    compiles: bool = False
    frozen: tuple[int, ...] = ()  # layers
    float8: str = ""  # torchao's scaling; "" without
    mesh: tuple[int, ...] = (2,)
    dims: tuple[str, ...] = ("dp",)  # of the mesh
    options: Mapping[str, Any] = field(default_factory=dict)  # of `fully_shard`


def _wrapped_in_float8(layer: Any, scaling: str) -> None:
    ao: Any = importlib.import_module("torchao.float8")
    config = ao.Float8LinearConfig(enable_fsdp_float8_all_gather=scaling == "tensorwise")
    ao.convert_to_float8_training(layer, config=config)


def _plan() -> dict[str, Any]:
    """Of tensor parallelism, for a layer."""
    into = dict.fromkeys(("query", "key", "value", "gate", "up"), ColwiseParallel())
    return {**into, "out": RowwiseParallel(), "down": RowwiseParallel()}


def _sharded(row: Row, shard: Shards, mesh: DeviceMesh) -> Any:
    torch.manual_seed(3)
    with torch.device("cuda"):
        net: Any = Model(SHAPE, LAYERS)
    for number, layer in enumerate(net.layers):
        if row.recomputes:
            layer.__class__ = Recomputing
        if number in row.frozen:
            layer.requires_grad_(False)
        if row.float8:
            _wrapped_in_float8(layer, row.float8)
        if "tp" in row.dims:
            parallelize_module(layer, mesh["tp"], _plan())
        if row.compiles:
            layer.compile()
    data = tuple(dim for dim in row.dims if dim != "tp")
    over = mesh[data] if data != row.dims else mesh
    for layer in net.layers:
        shard(layer, mesh=over, mp_policy=row.policy, **row.options)
    return shard(net, mesh=over, mp_policy=row.policy, **row.options)


def _trained(row: Row, shard: Shards) -> list[float]:
    """Losses and norms of all steps."""
    mesh = init_device_mesh("cuda", row.mesh, mesh_dim_names=row.dims)
    net = _sharded(row, shard, mesh)
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach="tp" not in row.dims)
    # Ranks of tensor parallelism have the same tokens.
    seed = mesh.get_local_rank(0) * 10 + (mesh.get_local_rank(1) if "replicas" in row.dims else 0)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(STEPS):
        for microbatch in range(row.microbatches):
            is_last = microbatch == row.microbatches - 1
            net.set_requires_gradient_sync(is_last)
            tokens = torch.randint(0, VOCAB, (1, SHAPE.tokens + 1), generator=generator)
            loss = net(tokens.cuda())
            (loss / row.microbatches).backward()
            found.append(loss.item())
        norms = [param.grad.norm().full_tensor() for param in trained]  # meshes may differ
        found.append(torch.stack(norms).norm().item())
        optimizer.step()
        optimizer.zero_grad()
        if row.float8 == "tensorwise":
            ao = importlib.import_module("torchao.float8")
            ao.precompute_float8_dynamic_scale_for_fsdp(net)
    del net, trained, optimizer, loss, norms
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return found


def trains_as_theirs(rank: int, world: int, row: Row) -> str:
    if row.float8 and importlib.util.find_spec("torchao") is None:
        return "skipped: torchao is not installed"
    expected, again, found = (_trained(row, shard) for shard in (theirs, theirs, ours))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=NEAR, atol=0)
    ones = [
        f"torch's with itself: {'the same bits' if expected == again else 'differs'}",
        f"ours with torch's: {'the same bits' if expected == found else 'differs'}",
        f"losses and norms {found}",
    ]
    return "; ".join(ones)


def _memory_while_sharding(shard: Shards, device: str) -> list[float]:
    """Peaks in GiB of each call of `shard`, a model's layers and the whole, beyond what was there
    before the model was made."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device(device):
        net: Any = Model(SHAPE, 2 * LAYERS)
    mesh = init_device_mesh("cuda", (2,))
    peaks = []
    for part in (*net.layers, net):
        torch.cuda.reset_peak_memory_stats()
        shard(part, mesh=mesh, mp_policy=BF16)
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
    peaks.append((torch.cuda.memory_allocated() - before) / 2**30)
    return peaks


def takes_no_more_memory(rank: int, world: int, device: str) -> str:
    """Than torch's function, in any call, but for what one layer takes."""
    expected, found = (_memory_while_sharding(shard, device) for shard in (theirs, ours))
    layer = 4 * sum(SHAPE.numels) / 2**30
    for here, there in zip(found, expected, strict=True):
        assert here <= there + layer, (found, expected)
    told = [[round(one, 2) for one in peaks] for peaks in (found, expected)]
    return f"GiB of each call, and after: {told[0]}, torch's {told[1]}; a layer is {layer:.2f}"


ROWS = {
    "bf16 compute": Row(),
    "two microbatches": Row(microbatches=2),
    "reduced in bf16": Row(ALL_BF16, microbatches=2),
    "recomputed": Row(recomputes=True, microbatches=2),
    "compiled": Row(compiles=True, microbatches=2),
    "frozen": Row(frozen=(0,)),
    "kept weights": Row(options={"reshard_after_forward": False}),
    "float8 gathers": Row(float8="tensorwise", microbatches=2),
    "float8 gathers, compiled": Row(float8="tensorwise", compiles=True),
    "float8 compute": Row(float8="of the layer alone"),
}
ROWS_OF_4 = {
    "replicas": Row(mesh=(2, 2), dims=("replicas", "dp"), microbatches=2),
    "tensor parallelism": Row(mesh=(2, 2), dims=("dp", "tp"), microbatches=2),
}
ON_2 = {name: Check(trains_as_theirs, (row,)) for name, row in ROWS.items()}
for place in ("cuda", "cpu"):
    ON_2[f"memory, from {place}"] = Check(takes_no_more_memory, (place,))
OUTCOMES = Outcomes(ON_2, timeout_s=300.0)
ON_4 = {name: Check(trains_as_theirs, (row,)) for name, row in ROWS_OF_4.items()}
OUTCOMES_OF_4 = Outcomes(ON_4, timeout_s=200.0, world=4)

test_it_trains_as_theirs = expecting(OUTCOMES)
test_it_trains_as_theirs_on_4_ranks = pytest.mark.skipif(
    shared_device.devices() < 4, reason="needs 4 CUDA devices"
)(expecting(OUTCOMES_OF_4))
