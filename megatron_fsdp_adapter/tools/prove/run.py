"""Runs the ranks of a proof.

Each rank trains with stock DDP, which is the reference. Then it trains with this package's wrapper,
saves, loads under another strategy, continues, and compares every step with the reference.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from megatron_fsdp_adapter.checkpoint.digests import silent
from megatron_fsdp_adapter.core.config import POISON_VARIABLE
from megatron_fsdp_adapter.megatron.options.table import OPTIONS
from megatron_fsdp_adapter.tools.progress import progress_bar
from megatron_fsdp_adapter.tools.prove import compare
from megatron_fsdp_adapter.tools.prove.compare import ComparedRow
from megatron_fsdp_adapter.tools.prove.scale_down import ScaledDown, routes_by_rounding

Options = Mapping[str, Any]
Values = dict[str, torch.Tensor]

TRAINED = "trained"
OTHER_STRATEGY: Mapping[str, str] = {
    "no_shard": "optim",
    "optim": "optim_grads_params",
    "optim_grads": "optim_grads_params",
    "optim_grads_params": "optim",
}
SIMPLER: Mapping[str, Any] = {one.name: one.default for one in OPTIONS if one.some_strategies}
"""Defaults of options that only some strategies support, for loads under another strategy."""


@dataclass(frozen=True)
class ProofPlan:
    """The plan of a proof.

    steps, more: steps before and after the save; folder: for the checkpoint; prepare:
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


class Step(NamedTuple):
    """The results of one step of training."""

    loss: float
    norm: float
    gradients: Values
    weights: Values


def _train(
    trainer: Any, first: int, last: int, advance: Callable[[], object]
) -> tuple[Values, list[Step]]:
    """The weights at the start, and the results of the steps `first` to `last` - 1. advance: called
    after each."""
    from megatron_fsdp_adapter.tools.prove import build

    start = trainer.weights()
    found = []
    for number in range(first, last):
        found.append(Step(*build.train_step(trainer, number)))
        build.set_rate(trainer.optimizer, trainer.options)
        advance()
    return start, found


def _load(plan: ProofPlan, options: Options, device: torch.device) -> Any:
    """A trainer with our wrapper that has loaded the plan's checkpoint."""
    from megatron_fsdp_adapter.checkpoint import (
        load_checkpoint,
        load_training_state,
        training_state,
    )
    from megatron_fsdp_adapter.tools.prove import build

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
    return trainer


def _run_rank(
    rank: int, plan: ProofPlan, backend: str, timeout: float, environment: Mapping[str, str]
) -> None:
    """Runs one rank, in a process of its own, and writes its comparisons to a file. Rank 0 shows a
    progress bar.

    timeout: seconds after which it exits. environment: variables in place of the process's."""
    # A rank prints its stacks after the timeout, and when it is ended because another one failed.
    faulthandler.dump_traceback_later(timeout, exit=True)
    faulthandler.register(signal.SIGTERM, chain=True)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{plan.folder}/store",
        rank=rank,
        world_size=plan.shrunk.world_size,
        timeout=timedelta(minutes=2),
    )
    total = 2 * (plan.steps + plan.more)  # the reference's steps, and ours
    bar = progress_bar("doctor --prove", "step") if rank == 0 else nullcontext(silent)
    with bar as advance:
        rows = _compared(plan, lambda: advance(1, total))
    _file_of(plan, rank).write_bytes(pickle.dumps(rows))
    dist.destroy_process_group()


def _file_of(plan: ProofPlan, rank: int) -> Path:
    return plan.folder / f"rank{rank}"


def _compared(plan: ProofPlan, advance: Callable[[], object]) -> list[ComparedRow]:
    """Trains the reference and ours, before and after a save and load; returns this rank's
    comparisons. advance: called after each step."""
    from megatron_fsdp_adapter.checkpoint import save_checkpoint, training_state
    from megatron_fsdp_adapter.checkpoint.record import topology_of
    from megatron_fsdp_adapter.tools.prove import build

    options = plan.shrunk.options
    last = plan.steps + plan.more
    # Stock DDP without a distributed optimizer would reduce over the ranks of one instance.
    device = build.start({**options, "num_distributed_optimizer_instances": 1})
    reference = _train(build.build_trainer(options, device, False), 0, last, advance)
    build.start(options)
    if plan.prepare is not None:
        plan.prepare()
    trainer = build.build_trainer(options, device, True)
    start, trained = _train(trainer, 0, plan.steps, advance)
    state = {**training_state(trainer.chunks, trainer.optimizer), "iteration": plan.steps}
    save_checkpoint(
        plan.folder / "checkpoint",
        plan.steps,
        state,
        topology=topology_of(SimpleNamespace(**options)),
    )
    rows = compare_steps(options, TRAINED, 0, start, trained, reference)
    other = {**options, **SIMPLER, "data_parallel_sharding_strategy": plan.other}
    start, more = _train(_load(plan, other, device), plan.steps, last, advance)
    saved = trained[-1].weights
    rows.append(
        compare.compare_tensors(plan.loaded, plan.steps, "weights as loaded", start, saved, 0.0)
    )
    return rows + compare_steps(options, plan.loaded, plan.steps, start, more, reference)


def prove(plan: ProofPlan, backend: str, timeout: float) -> list[ComparedRow]:
    """Runs the ranks; returns the worst rank's row of each comparison.

    Raises torch's `ProcessRaisedException` or `ProcessExitedException` if a rank fails, or runs for
    more than `timeout` seconds."""
    world = plan.shrunk.world_size
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT, WORLD_SIZE=str(world))
    # A CUDA context does not survive a fork, and importing Transformer Engine creates one.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    multiprocessing.set_forkserver_preload(["megatron_fsdp_adapter.tools.prove.build"])
    arguments = (plan, backend, timeout, dict(os.environ))
    try:
        start_processes(_run_rank, arguments, world, start_method=method)
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = [pickle.loads(_file_of(plan, rank).read_bytes()) for rank in range(world)]
    return [max(same, key=compare.rank_of) for same in zip(*found, strict=True)]


ENVIRONMENT: Mapping[str, str] = {
    POISON_VARIABLE: "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "PYTHONWARNINGS": "ignore",
}
"""Environment variables of all ranks."""


POLICY = (
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
"""Options for dtypes of main weights, gradients and optimizer state."""


def narrowest(options: Options) -> str:
    """The name of the narrowest dtype of compute and of `POLICY`: fp8, bf16, fp16 or fp32."""
    if options.get("fp8"):
        return "fp8"
    policy = [str(options.get(name)) for name in POLICY]
    if options.get("bf16") or any("bf16" in name or "bfloat16" in name for name in policy):
        return "bf16"
    return "fp16" if options.get("fp16") else "fp32"


def compare_steps(
    options: Options,
    run: str,
    first: int,
    start: Values,
    steps: Sequence[Step],
    reference: tuple[Values, Sequence[Step]],
) -> list[ComparedRow]:
    """Comparisons of a run's steps with the reference's: loss, gradients, norm and update of each.

    first: number of steps before `steps`. start: the weights before them. reference: weights at its
    start, and its steps from the first on."""
    dtype = narrowest(options)
    before_all, expected = reference
    weights = [before_all, *(step.weights for step in expected)]
    rows = []
    for number, mine in enumerate(steps, first + 1):
        theirs = expected[number - 1]
        bounds = {name: compare.bound(dtype, name, number) for name in compare.FACTORS[dtype]}
        numbers = partial(compare.compare_numbers, run, number)
        tensors = partial(compare.compare_tensors, run, number)
        loss = numbers("loss", mine.loss, theirs.loss, bounds["loss"])
        norm = numbers("norm", mine.norm, theirs.norm, bounds["norm"])
        if number > 1 and routes_by_rounding(options):  # gradients and updates may differ
            rows += [loss, norm]
        else:
            allowed = bounds["gradients"]
            gradients = tensors("gradients", mine.gradients, theirs.gradients, allowed)
            so_far = [step.gradients for step in expected[:number]]
            updated = compare.significant_update(start, mine.weights, so_far, allowed)
            before = weights[number - 1]
            wanted = compare.significant_update(before, theirs.weights, so_far, allowed)
            update = tensors("update", updated, wanted, bounds["update"])
            rows += [loss, gradients, norm, update]
        start = mine.weights
    return rows
