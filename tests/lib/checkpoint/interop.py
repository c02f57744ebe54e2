"""Trainings that save with one engine, Megatron's bundled one or ours, and load with either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fsdp_adapter.checkpoint.atomic import write_atomically
from megatron_fsdp_adapter.checkpoint.folders import TRACKER
from tests.lib.gpt import gpt
from tests.lib.gpt.checkpoints import loaded, saved
from tests.lib.ranks.launch import run_ranks

CASE = gpt.Case(swiglu=True, bf16=True, microbatches=2)
STEPS = (2, 3)
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
