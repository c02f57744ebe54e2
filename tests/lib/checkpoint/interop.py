"""Trainings that save with one engine, Megatron's bundled one or ours, and load with either."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.transformer.module import Float16Module
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_adapter.checkpoint.atomic import write_atomically
from megatron_fsdp_adapter.checkpoint.folders import TRACKER
from megatron_fsdp_adapter.state.names import OPTIMIZER_META as META
from tests.lib.checkpoint.reshard_cases import (
    TRAINED,
    ZERO3,
    Split,
    Whole,
    case_of,
    differences,
    split_of,
    trainer_of,
    whole_state,
)
from tests.lib.gpt import gpt, topologies
from tests.lib.gpt.checkpoints import loaded, saved
from tests.lib.gpt.topologies import init_topology
from tests.lib.ranks.launch import run_ranks

CASE = gpt.Case(swiglu=True, bf16=True, microbatches=2)
STEPS = (2, 3)
FOLDER = "iter_0000002"
Values = dict[str, np.ndarray]
"""Flat, as arrays: a tensor's storage ends with the process that sends it."""


def _whole(trainer: gpt.Trainer, full: Callable[[dict[str, Any]], dict[str, Any]]) -> Values:
    """Main weights and moments, which `full` makes whole; collective."""
    state = trainer.optimizer.optimizer.state
    values: dict[str, Any] = {}
    for name, param in trainer.wrapper.named_parameters():
        values[gpt.plain_name(name)] = param
        for moment in ("exp_avg", "exp_avg_sq"):
            if param in state:
                values[f"{gpt.plain_name(name)}.{moment}"] = state[param][moment]
    return {name: value.float().reshape(-1).numpy() for name, value in full(values).items()}


def _steps(trainer: gpt.Trainer, device: torch.device, steps: tuple[int, ...]) -> list[float]:
    """Losses on the data of one rank, which all ranks see."""
    return [gpt.train_step(trainer, gpt.batches(CASE, step, 0, device))[0] for step in steps]


def run_bundled(rank: int, world: int, given: str, root: str, optimizer: bool) -> dict[str, Any]:
    """Saves into `root` what it loads from `given`, or trains where there is no such folder."""
    from tests.lib.checkpoint import bundled

    device = gpt.init_megatron()
    bundled.run_on_cpu()
    trainer = bundled.build_bundled(CASE.but(seed=7), "optim_grads_params", device)
    if given:
        bundled.load(trainer, f"{given}/iter_0000002", optimizer)
    else:
        _steps(trainer, device, (0, 1))
    bundled.save(trainer, f"{root}/iter_0000002", optimizer)
    if rank == 0:
        write_atomically(Path(root) / TRACKER, "2")
    whole: Values = {}
    if world == 1:
        trainer.wrapper.module.state_dict()  # it shows the main weights then
        whole = _whole(
            trainer,
            lambda values: {  # on one rank every local tensor is whole
                name: value.to_local().detach().clone() for name, value in values.items()
            },
        )
    trainer.wrapper.module.zero_grad_buffer()
    return {"whole": whole, "losses": _steps(trainer, device, STEPS)}


def run_ours(
    rank: int, world: int, action: str, root: str, optimizer: bool, strategy: str
) -> dict[str, Any]:
    device = gpt.init_megatron()
    trainer = gpt.build_trainer(CASE.but(seed=8), strategy, device)
    if action == "save":
        _steps(trainer, device, (0, 1))
        saved(trainer, root, 2, with_optimizer=optimizer)
    else:
        loaded(trainer, root, with_optimizer=optimizer)
    trainer.wrapper.stop_communication()
    return {"whole": _whole(trainer, gpt.full_all), "losses": _steps(trainer, device, STEPS)}


# A model with experts, from one rank of the bundled engine to ours under any split.


def _experts(split: Split, gated: bool) -> Split:
    return replace(split, case={"swiglu": gated})


def run_bundled_experts(rank: int, world: int, root: str, gated: bool) -> None:
    """Trains and saves into `root`; beside it what it has saved, as `whole_state` has it."""
    from tests.lib.checkpoint import bundled

    split = _experts(split_of(1, ZERO3, ep=1), gated)
    init_topology(split.topology)
    bundled.run_on_cpu()
    case = case_of(split)
    config = topologies.model_config(
        split.topology,
        case,
        **dict.fromkeys(("params_dtype", "pipeline_dtype"), torch.bfloat16),
        bf16=True,
    )
    # As Megatron-LM builds it: the engine's checkpoint code looks for that module, too.
    model = Float16Module(config, topologies.build_chunk(split.topology, case, config, 0))
    ddp = gpt.ddp_config(case, split.strategy, {"gradient_reduce_div_fusion": False})
    wrapper = bundled.mcore_fsdp_adapter.FullyShardedDataParallel
    with mock.patch.object(topologies, "FullyShardedDataParallel", wrapper):
        trainer = topologies.wrapped(split.topology, case, [model], split.strategy, ddp, {})
    for step in range(TRAINED):
        topologies.run_schedule(trainer, step)
        trainer.optimizer.step()
    chunk = trainer.chunks[0]
    wrapped = SimpleNamespace(wrapper=chunk, optimizer=trainer.optimizer, case=trainer.case)
    bundled.save(wrapped, f"{root}/{FOLDER}")
    write_atomically(Path(root) / TRACKER, "2")
    chunk.module.state_dict()  # it shows the main weights then
    adam = trainer.optimizer.optimizer.state
    whole: Whole = {}
    for name, param in chunk.named_parameters():
        fields = {}
        for what, value in {"weight": param, **adam[param]}.items():
            fields[what] = getattr(value, "_local_tensor", value).detach().clone()
        whole[gpt.plain_name(name)] = fields
    torch.save(whole, f"{root}/whole.pt")


def load_experts(rank: int, world: int, root: str, gated: bool, target: Split) -> list[str]:
    """What is not the same bits in ours, under another split, as was saved."""
    trainer = trainer_of(_experts(target, gated))
    loaded(trainer, root)
    return differences(whole_state(trainer), torch.load(f"{root}/whole.pt"))


def rewrite_as_version_2(root: str) -> None:
    """Gives a checkpoint of the bundled engine's version 1 the names of version 2.

    As of Megatron-LM main, commit d98e8a64. Its wrapper is no model in a model
    (`FullyShardedDataParallelV2`, mcore_fsdp_adapter.py): a state dict has the names of core's
    model (`_BaseDataParallel.state_dict_for_save_checkpoint`, data_parallel_base.py), and
    `get_global_unique_param_name` (fsdp_dtensor_checkpoint.py), from which optimizer state has its
    names, those of one wrapper around it. That commit saves no optimizer state of version 2; a
    later proposal (Megatron-LM#6215) gives it the layout of version 1. Both split SwiGLU's weights
    by attributes of version 1's parameters, so a model without them is taken."""
    folder = Path(root, FOLDER)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            state[key] = None
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    shutil.rmtree(folder)
    found: dict[str, Any] = {}
    for key, value in state.items():
        assert key.startswith(("model.module.", f"{META}.module.module.", "optimizer.state."))
        found[key.replace("module.", "", 1)] = value
    dcp.save(found, checkpoint_id=folder, no_dist=True)


def half(
    engine: str, action: str, root: str, strategy: str = "optim_grads_params"
) -> dict[str, Any]:
    """Saves or loads: the bundled engine on one rank, where it can save optimizer state; ours on
    two, under a strategy."""
    if engine == "bundled":
        if action == "save":
            folders = ("", root)
        else:
            folders = (root, f"{root}/again")
        return run_ranks(run_bundled, 1, *folders, True, timeout=300)[0]
    return run_ranks(run_ours, 2, action, root, True, strategy, timeout=300)[0]


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert set(a["whole"]) == set(b["whole"])
    assert sum(name.endswith("exp_avg_sq") for name in a["whole"]) > 10
    different = [n for n in a["whole"] if not np.array_equal(a["whole"][n], b["whole"][n])]
    assert different == []
    # bf16 compute: the two engines add gradients up in other orders.
    for mine, theirs in zip(a["losses"], b["losses"], strict=True):
        assert abs(mine - theirs) <= 2e-3 * abs(theirs), (a["losses"], b["losses"])
