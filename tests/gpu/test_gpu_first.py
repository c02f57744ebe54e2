"""A step that updates first what the next forward gathers first, on two GPUs: the bits of a step in
one, eager, in graphs of layers and in a captured iteration, and what of it runs beside Adam.

    python -m pytest -q -rA tests/gpu/test_gpu_first.py
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fsdp_adapter.core.config import POISON_VARIABLE
from megatron_fsdp_adapter.sharding import first_unit
from megatron_fsdp_adapter.sharding.budget import OPTION as BUDGET
from tests.distributed.checks import Step, check_run_bits
from tests.distributed.early_gathers import EARLY, of_whole_iterations
from tests.distributed.gpt import Trainer, build_trainer, init_megatron
from tests.gpu.captured import forget_graphs
from tests.gpu.gpu_ranks import Check, Outcomes
from tests.gpu.test_gpu_graphs import WARMUP, _run
from tests.gpu.test_gpu_layer_graphs import CELLS, _trainer
from tests.gpu.test_gpu_memory import _steps
from tests.gpu.test_gpu_optimizer_offload import Span, _local_run, _shared, _union
from tests.gpu.test_gpu_updates import WIDE, ZERO_3, _evaluated, _step, _unread

CAPTURED = WIDE.but(seq=1024, recompute=None, microbatches=2)
CELLS_OF_ITERATIONS: dict[str, dict[str, Any]] = {
    "slots": {"fsdp_double_buffer": True},
    "copy engines": {
        "fsdp_copy_engine_all_gather": True, "fsdp_copy_engine_reduce_scatter": True
    },
    "no slots": {},
    "kept": {"fsdp_double_buffer": True, BUDGET: 1000.0},
}
STEPS = 7


@contextmanager
def _poisoned() -> Iterator[None]:
    """Inside, buffers of new wrappers are NaN whenever they are handed out or given back."""
    with mock.patch.dict("os.environ", {POISON_VARIABLE: "1"}):
        yield


@contextmanager
def _in_one(plain: bool) -> Iterator[None]:
    """Inside, new optimizers take steps as ever, if they are to; else they begin with the first
    units."""
    with ExitStack() as stack:
        stack.enter_context(of_whole_iterations())
        if plain:
            stack.enter_context(mock.patch.object(first_unit, "first_units", lambda engine: []))
        yield


def _count(trainer: Trainer, name: str) -> list[int]:
    """Of units, in each call of a method of the gathers' from now on."""
    pipeline, found = trainer.wrapper.engine.gather, []
    inner = getattr(pipeline, name)

    def counted(units: Any) -> None:
        found.append(len(units))
        inner(units)

    setattr(pipeline, name, counted)
    return found


def eager(rank: int, world: int, options: dict[str, Any]) -> str:
    """Weights are read after steps, and after several between which nobody has read any."""
    device, runs = init_megatron(), []
    for plain in (True, False):
        with _in_one(plain), _poisoned():
            trainer = build_trainer(WIDE, ZERO_3, device, ddp={**options, **EARLY})
            early = _count(trainer, "gather_early")
            runs.append(_local_run(trainer, rank, 2, device))
            runs[-1] += [_unread(trainer, 2 + number, rank, device) for number in range(3)]
            runs[-1].append(_evaluated(trainer, rank, device))
            runs[-1] += _local_run(trainer, rank, 1, device)
            assert early == ([] if plain else [2] * 6), early
            steps = {group.get("step") for group in trainer.optimizer.param_groups}
            assert steps <= {6, None}, steps
        del trainer
        gc.collect()
    check_run_bits(runs[1], runs[0], "eager")
    norms = [[step.norm for step in run] for run in runs]
    assert norms[0] == norms[1] and max(norms[0]) > WIDE.clip, norms
    return f"norms {min(norms[0][:5]):.3f} to {max(norms[0]):.3f}"


def in_layer_graphs(rank: int, world: int, name: str) -> str:
    device, runs = init_megatron(), []
    cell = replace(CELLS[name], ddp={**CELLS[name].ddp, **EARLY})
    for plain in (True, False):
        with _in_one(plain), _poisoned():
            trainer = _trainer(cell, device, captured=True)
            graphs = trainer.wrapper._layers.graphs
            unread = [_step(trainer, number, rank, device) for number in range(6)]
            runs.append(unread + _local_run(trainer, rank, 1, device))
            assert graphs.replayed, graphs.ran_eagerly
        del trainer, graphs
        gc.collect()
    check_run_bits(runs[1], runs[0], name)
    return f"last loss {runs[0][-1].loss:.4f}"


def in_captured_iterations(rank: int, world: int, name: str) -> str:
    """With an evaluation between steps that is replayed twice, and a step that is left out."""
    device, runs = init_megatron(), []
    for plain in (True, False):
        tensor_parallel.model_parallel_cuda_manual_seed(
            7, use_cudagraphable_rng=True, force_reset_rng=True
        )
        ddp = {"check_for_nan_in_grad": False, **CELLS_OF_ITERATIONS[name], **EARLY}
        with _in_one(plain), _poisoned():
            trainer = build_trainer(CAPTURED, ZERO_3, device, ddp=ddp)
            early = _count(trainer, "gather_early")
            schedule = FullCudaGraphWrapper(
                get_forward_backward_func(), cuda_graph_warmup_steps=WARMUP
            )
            try:
                runs.append(_iterations(trainer, schedule, rank))
                assert all(FullCudaGraphWrapper.cuda_graph.values()), "not captured"
            finally:
                forget_graphs()
            of_eager = WARMUP if name == "no slots" else STEPS
            assert early == ([] if plain else [2] * of_eager), early
        del trainer, schedule
        gc.collect()
    check_run_bits(runs[1], runs[0], name)
    dist.barrier()
    return f"{len(runs[0])} passes, last loss {runs[0][-1].loss:.4f}"


def _iterations(trainer: Trainer, schedule: Any, rank: int) -> list[Step]:
    found = []
    for step in range(STEPS):
        loss = _run(trainer, schedule, step, rank, training=True).item()
        success, norm, _ = trainer.optimizer.step()
        assert success
        found.append(Step(loss, float(norm), {}, {}))
        if step % 2:
            found += [_evaluation(trainer, schedule, 90 + step, rank) for _ in range(2)]
        if step == 4:  # nobody steps
            loss = _run(trainer, schedule, 80, rank, training=True).item()
            found.append(Step(loss, 0.0, {}, {}))
    trainer.wrapper.stop_communication()
    own = {
        name: param._local_tensor.detach().cpu().clone()
        for name, param in trainer.wrapper.named_parameters()
    }
    return [*found, Step(found[-1].loss, 0.0, {}, own)]


def _evaluation(trainer: Trainer, schedule: Any, number: int, rank: int) -> Step:
    trainer.wrapper.eval()
    with torch.no_grad():
        loss = _run(trainer, schedule, number, rank, training=False).item()
    trainer.wrapper.train()
    return Step(loss, 0.0, {}, {})


def beside_adam(rank: int, world: int) -> str:
    """How much of the communication that runs beside Adam: a report, without a bound on it."""
    device, shares = init_megatron(), []
    for plain in (True, False):
        with _in_one(plain):
            trainer = build_trainer(WIDE, ZERO_3, device, ddp=EARLY)
            _steps(trainer, rank, 2, device)
            torch.cuda.synchronize()
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                _steps(trainer, rank, 3, device)
                torch.cuda.synchronize()
        adam: list[Span] = []
        gathers: list[Span] = []
        for event in profile.events():
            span, kind = (event.time_range.start, event.time_range.end), event.name.lower()
            if "adam" in kind:
                adam.append(span)
            elif "allgather" in kind:
                gathers.append(span)
        shares.append(_shared(_union(adam), _union(gathers)) / 3e3)
        assert adam and gathers, sorted({event.name for event in profile.events()})
        del trainer, profile
        gc.collect()
    return f"gathers beside Adam: {shares[0]:.2f} ms a step before, {shares[1]:.2f} now"


CHECKS: dict[str, Check] = {
    "eager": Check(eager, ({},)),
    "eager, slots": Check(eager, ({"fsdp_double_buffer": True},)),
    "layer graphs": Check(in_layer_graphs, ("whole layers",)),
    **{
        f"iterations, {name}": Check(in_captured_iterations, (name,))
        for name in CELLS_OF_ITERATIONS
    },
    "beside Adam": Check(beside_adam),
}
OUTCOMES = Outcomes(CHECKS, timeout_s=240.0)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)
