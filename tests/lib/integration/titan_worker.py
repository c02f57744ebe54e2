"""Decoders of torchtitan, parallelized by its own functions, which `test_torchtitan.py` trains with
torch's `fully_shard` and with ours. Attention is torch's, as torchtitan's needs a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import cross_entropy
from torchtitan.tools import utils as tools

from megatron_fsdp_adapter import leave_fsdp2, use_as_fsdp2

tools.device_type = "cpu"  # before the next imports, which read it

# ruff: noqa: E402
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import ScaledDotProductAttention

TOKENS = 16
FLOAT32 = {"mixed_precision_param": "float32", "mixed_precision_reduce": "float32"}
BF16 = {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"}
TP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
EP = {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}
REPLICAS = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}

Case = tuple[str, str, dict[str, Any], dict[str, str], int]
"""Module of torchtitan's models, flavor (with `FLOAT8` behind it for linear layers of torchao),
options of parallelism, dtypes, microbatches."""
FLOAT8 = "+float8"

CASES: dict[int, dict[str, Case]] = {
    2: {
        "llama3": ("llama3", "debugmodel", {}, FLOAT32, 1),
        "llama3, bf16, recomputed": (
            "llama3", "debugmodel", {"fsdp_reshard_after_forward": "never"}, BF16, 2,
        ),
        "llama3, float8": ("llama3", f"debugmodel{FLOAT8}", {}, BF16, 2),
        "qwen3, experts": ("qwen3", "debugmodel_moe", {}, FLOAT32, 1),
    },
    4: {
        "llama3, TP": ("llama3", "debugmodel", TP, FLOAT32, 1),
        "llama3, TP, replicas": (
            "llama3", "debugmodel", {**REPLICAS, "tensor_parallel_degree": 2}, FLOAT32, 1,
        ),
        "qwen3, experts, TP": ("qwen3", "debugmodel_moe", TP, FLOAT32, 1),
        "qwen3, experts, EP": ("qwen3", "debugmodel_moe", EP, FLOAT32, 1),
    },
}  # fmt: skip
"""By the number of ranks."""


def float8() -> Any:
    """torchtitan's converter to linear layers of torchao, which compute as a GPU would."""
    module: Any = importlib.import_module("torchtitan.components.quantization.float8")
    return module.Float8LinearConverter.Config(emulate=True, model_compile_enabled=False)


def _parallelized(case: Case, world: int) -> tuple[Any, ParallelDims]:
    """A model of two layers from the meta device, with values that depend on names alone."""
    family, flavor, options, dtypes, microbatches = case
    utils.set_spmd_backend("partial_dtensor")
    converters = [float8()] if flavor.endswith(FLOAT8) else []
    registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    spec = registry(flavor.removesuffix(FLOAT8), converters=converters)
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **options)
    training = TrainingConfig(**dtypes)
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model.update_from_config(config=types.SimpleNamespace(parallelism=parallelism))
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    with torch.device("meta"):
        made = spec.model.build()
    made = spec.parallelize_fn(
        made,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config() if microbatches > 1 else None,
        dump_folder="",
    )
    for module in made.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not divide
    made.to_empty(device="cpu")
    with torch.no_grad():
        made.init_weights(buffer_device=None)
        for name, param in made.named_parameters():
            seeded = torch.Generator().manual_seed(sum(map(ord, name)))
            values = torch.randn(param.shape, generator=seeded) * 0.05 + ("norm" in name)
            param.copy_(distribute_tensor(values, param.device_mesh, param.placements))
    return made.train(), dims


def _trained(case: Case, rank: int, world: int, folder: Path) -> list[float]:
    """Losses and norms of steps, of which the last one is repeated from a checkpoint."""
    made, dims = _parallelized(case, world)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    found = []

    def step(number: int) -> None:
        for microbatch in range(case[4]):
            seed = 100 * number + 10 * microbatch + rank // dims.tp
            seeded = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, 2048, (2, TOKENS + 1), generator=seeded)
            positions = torch.arange(TOKENS).expand(2, TOKENS)
            logits = made(tokens[:, :-1], positions=positions)
            logits = logits.full_tensor() if dims.tp > 1 else logits
            targets = tokens[:, 1:].flatten()
            loss = cross_entropy(logits.flatten(0, 1).float(), targets) * dims.tp / world
            loss.backward()
        norm = utils.clip_grad_norm_(made.parameters(), 1.0, ep_enabled=dims.ep_enabled)
        found.extend([loss.item(), norm.item()])
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    dcp.save(ModelWrapper(made).state_dict(), checkpoint_id=folder)
    state = {name: value.full_tensor() for name, value in made.named_parameters()}
    step(1)
    read = ModelWrapper(made).state_dict()
    dcp.load(read, checkpoint_id=folder)
    ModelWrapper(made).load_state_dict(read)
    for name, value in made.named_parameters():
        assert torch.equal(value.full_tensor(), state[name]), name
    step(1)
    return found


def compare(rank: int, world: int, folder: Path) -> None:
    """Both sides of each case, which must have the same bits."""
    sides: tuple[Callable[[], Any], ...] = (leave_fsdp2, use_as_fsdp2)
    for number, (name, case) in enumerate(CASES[world].items()):
        if case[1].endswith(FLOAT8) and importlib.util.find_spec("torchao") is None:
            continue
        found = []
        for use in sides:
            use()
            found.append(_trained(case, rank, world, folder / f"{number} {use.__name__}"))
        leave_fsdp2()
        assert found[0] == found[1], f"{name}: {found}"
