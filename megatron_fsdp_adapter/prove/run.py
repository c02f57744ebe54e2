"""Runs the ranks of a proof and compares their traces.

The ranks train with stock DDP, which is the reference, and with this package's wrapper, save, load
under another strategy and continue.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_fsdp_adapter.core.config import POISON_VARIABLE
from megatron_fsdp_adapter.megatron.options.table import OPTIONS
from megatron_fsdp_adapter.prove import compare, ranks
from megatron_fsdp_adapter.prove.compare import Row
from megatron_fsdp_adapter.prove.scale_down import (
    ScaledDown,
    routes_by_rounding,
)

Options = Mapping[str, Any]

REFERENCE, TRAINED = "reference", "trained"
OTHER_STRATEGY: Mapping[str, str] = {
    "no_shard": "optim",
    "optim": "optim_grads_params",
    "optim_grads": "optim_grads_params",
    "optim_grads_params": "optim",
}
SIMPLER: Mapping[str, Any] = {one.name: one.default for one in OPTIONS if one.some_strategies}
"""Defaults of options that only some strategies support, for loads under another strategy."""


@dataclass(frozen=True)
class Plan:
    """The plan of a proof.

    steps, more: steps before and after the save; folder: for traces and checkpoints; prepare:
    called on every rank of ours before it builds (tests break the engine with it)."""

    shrunk: ScaledDown
    folder: Path
    steps: int = 3
    more: int = 2
    prepare: Callable[[], None] | None = None

    @property
    def other(self) -> str:
        """The strategy under which the run's ranks load."""
        return OTHER_STRATEGY[self.shrunk.options["data_parallel_sharding_strategy"]]

    @property
    def loaded(self) -> str:
        """The name of the run that loads."""
        return f"loaded as {self.other}"

    def trace(self, run: str, rank: int, step: int) -> Path:
        """The trace file of a rank after a step."""
        return self.folder / "traces" / f"{run.replace(' ', '-')}.{rank}.{step}.pt"


def _record(plan: Plan, run: str, rank: int, trainer: Any, first: int, last: int) -> None:
    from megatron_fsdp_adapter.prove import build

    torch.save(trainer.weights(), plan.trace(run, rank, first))
    for number in range(first, last):
        found = build.train_step(trainer, number)
        build.set_rate(trainer.optimizer, trainer.options)
        torch.save(found, plan.trace(run, rank, number + 1))


def _load(plan: Plan, rank: int, options: Options, device: torch.device) -> None:
    from megatron_fsdp_adapter.checkpoint import (
        load_checkpoint,
        load_training_state,
        training_state,
    )
    from megatron_fsdp_adapter.prove import build

    trainer = build.build_trainer(options, device, True)
    with torch.no_grad():  # otherwise weights that a load skips would be right by chance
        for chunk in trainer.chunks:
            chunk.stop_communication()
            for pair in chunk.engine.pairs:
                pair.sharded._local_tensor.add_(1.0)
    state = {**training_state(trainer.chunks, trainer.optimizer, is_loading=True), "iteration": 0}
    _, loaded = load_checkpoint(plan.folder / "checkpoint", state)
    load_training_state(trainer.chunks, loaded, trainer.optimizer)
    build.set_rate(trainer.optimizer, options)
    _record(plan, plan.loaded, rank, trainer, plan.steps, plan.steps + plan.more)


def run_rank(rank: int, world: int, plan: Plan) -> None:
    """Runs a rank: the reference, training, save, load under another strategy."""
    from megatron_fsdp_adapter.checkpoint import save_checkpoint, training_state
    from megatron_fsdp_adapter.checkpoint.record import topology_of
    from megatron_fsdp_adapter.prove import build

    options = plan.shrunk.options
    # Stock DDP without a distributed optimizer would reduce over the ranks of one instance.
    device = build.start({**options, "num_distributed_optimizer_instances": 1})
    reference = build.build_trainer(options, device, False)
    _record(plan, REFERENCE, rank, reference, 0, plan.steps + plan.more)
    del reference
    build.start(options)
    if plan.prepare is not None:
        plan.prepare()
    trainer = build.build_trainer(options, device, True)
    _record(plan, TRAINED, rank, trainer, 0, plan.steps)
    state = {**training_state(trainer.chunks, trainer.optimizer), "iteration": plan.steps}
    save_checkpoint(plan.folder / "checkpoint", plan.steps, state,
                    topology=topology_of(SimpleNamespace(**options)))  # fmt: skip
    other = {**options, **SIMPLER, "data_parallel_sharding_strategy": plan.other}
    _load(plan, rank, other, device)


def prove(plan: Plan, backend: str, timeout: float) -> list[Row]:
    """Runs the ranks and compares. Raises `ranks.RanksError` if a rank fails or hangs."""
    (plan.folder / "traces").mkdir(parents=True, exist_ok=True)
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        ranks.run_ranks(run_rank, plan.shrunk.world_size, plan, timeout=timeout, backend=backend)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return compare_all(plan)


ENVIRONMENT: Mapping[str, str] = {
    POISON_VARIABLE: "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "PYTHONWARNINGS": "ignore",
}


def narrowest(options: Options) -> str:
    """The narrowest dtype of a gradient: of compute, wire or accumulation."""
    if options.get("fp8"):
        return "fp8"
    policy = [str(options.get(f"megatron_fsdp_{name}_dtype"))
              for name in ("main_params", "main_grads", "grad_comm")]  # fmt: skip
    policy += [str(options.get(f"exp_avg{name}_dtype")) for name in ("", "_sq")]
    if options.get("bf16") or any("bf16" in name or "bfloat16" in name for name in policy):
        return "bf16"
    return "fp16" if options.get("fp16") else "fp32"


def compare_all(plan: Plan) -> list[Row]:
    """Comparisons of all runs: the worst rank of each quantity in each step."""
    rows: list[Row] = []
    end, here = plan.steps + plan.more, range(plan.shrunk.world_size)
    for run, first, last in ((TRAINED, 0, plan.steps), (plan.loaded, plan.steps, end)):
        if run != TRAINED:
            rows.append(_loaded(plan, run, here))
        for number in range(first + 1, last + 1):
            by_rank = [_compare_step(plan, run, rank, number) for rank in here]
            rows += [_worst(list(same)) for same in zip(*by_rank, strict=True)]
    return rows


def _worst(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: compare._rank(row.difference))


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _loaded(plan: Plan, run: str, here: Sequence[int]) -> Row:
    rows = []
    for rank in here:
        saved = _read(plan.trace(TRAINED, rank, plan.steps))[3]
        found = _read(plan.trace(run, rank, plan.steps))
        rows.append(compare.compare_tensors(run, plan.steps, "weights as loaded", found, saved,
                                            0.0))  # fmt: skip
    return _worst(rows)


def _compare_step(plan: Plan, run: str, rank: int, number: int) -> list[Row]:
    o = plan.shrunk.options
    dtype = narrowest(o)

    def limit(quantity: str) -> float:
        return compare.bound(dtype, quantity, number)

    loss, norm, gradients, weights = _read(plan.trace(run, rank, number))
    ref_loss, ref_norm, ref_gradients, ref_weights = _read(plan.trace(REFERENCE, rank, number))
    numbers = [
        compare.compare_numbers(run, number, "loss", loss, ref_loss, limit("loss")),
        compare.compare_numbers(run, number, "norm", norm, ref_norm, limit("norm")),
    ]
    if number > 1 and routes_by_rounding(o):
        return numbers
    so_far = [_read(plan.trace(REFERENCE, rank, n))[2] for n in range(1, number)]
    so_far.append(ref_gradients)
    updates = []
    for name, after in ((run, weights), (REFERENCE, ref_weights)):
        before = _weights_before(plan, name, rank, number)
        updates.append(compare.significant_update(before, after, so_far, limit("gradients")))
    return [
        numbers[0],
        compare.compare_tensors(run, number, "gradients", gradients, ref_gradients,
                                limit("gradients")),
        numbers[1],
        compare.compare_tensors(run, number, "update", updates[0], updates[1],
                                limit("update")),
    ]  # fmt: skip


def _weights_before(plan: Plan, run: str, rank: int, number: int) -> dict[str, torch.Tensor]:
    found = _read(plan.trace(run, rank, number - 1))
    return found[3] if isinstance(found, tuple) else found
