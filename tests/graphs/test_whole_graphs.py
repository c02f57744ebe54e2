"""Whole iterations in graphs, which core's own wrapper captures and replays on the host, where what
is captured is noted operator by operator: a graph has every gather."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import full_cuda_graph
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fsdp_adapter.core.engine.partition import unchecked
from megatron_fsdp_adapter.graphs.full_iteration import FullIterationGraphs
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.engine.fake_graphs import HostTorch
from tests.lib.gpt.checks import check_same_bits
from tests.lib.gpt.gpt import Case, Trainer, build_trainer, full_weights, init_megatron
from tests.lib.gpt.topologies import run_schedule
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("graphs/full_iteration.py", "graphs/capture.py", "core/engine/gather.py")

CASE = Case(
    num_layers=3, hidden=12, heads=2, ffn=20, vocab=23, seq=5, microbatches=2, bf16=True, clip=0.1
)
SLOTS = {"fsdp_double_buffer": True, "check_for_nan_in_grad": False}
WARMUP = 2
STEPS = 6
ZERO_3 = "optim_grads_params"


class HostIterations(FullCudaGraphWrapper):
    """Core's wrapper, unmodified, with graphs on the host, which none of its class's other users
    see. Checked against 0.16.1 and 0.19.2."""

    def __init__(self, host: HostTorch) -> None:
        self.forward_backward_func = get_forward_backward_func()
        self.cuda_graph_warmup_steps = WARMUP
        self.use_single_mempool = False
        self.kept: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        self.static_loader = self._load
        host.autograd = torch.autograd
        host.cuda.CUDAGraph = lambda: SimpleNamespace(register_generator_state=lambda state: None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with unchecked():  # a replay looks at no parameter, only at memory
            return super().__call__(*args, **kwargs)

    def _load(self, inputs: Any, stage: str, microbatch: int) -> dict[str, torch.Tensor]:
        assert isinstance(inputs, dict), "StaticBufferLoader takes dicts"
        kept = self.kept.setdefault((stage, microbatch), {})
        for name, value in inputs.items():
            kept.setdefault(name, torch.empty_like(value)).copy_(value)
        return kept


def host_torch() -> Any:
    """Inside, core's module captures on the host, and no graph is left behind."""
    host = HostTorch()
    nothing = {"training": None, "validation": None}
    more = {
        name: lambda *unused: None
        for name in ("get_graph_pool", "get_shared_capture_stream")
        if hasattr(full_cuda_graph, name)
    }
    return (
        host,
        mock.patch.multiple(full_cuda_graph, torch=host, get_all_rng_states=dict, **more),
        mock.patch.multiple(
            FullCudaGraphWrapper,
            cuda_graph=dict(nothing),
            result=dict(nothing),
            curr_iteration={"training": 0, "validation": 0},
        ),
    )


def run(trainer: Trainer, schedule: Any, number: int, training: bool) -> float:
    """The mean loss of this rank's microbatches, of a step's passes or of an evaluation."""
    trainer.wrapper.train(training)
    with torch.set_grad_enabled(training):
        loss = run_schedule(trainer, number, not training, schedule)
    trainer.wrapper.train()
    return loss


def between(trainer: Trainer, schedule: Any, number: int) -> list[float]:
    """What may come between two steps; by number, so that each comes between replays too."""
    evaluate = functools.partial(run, trainer, schedule, 90, training=False)
    engine = trainer.wrapper.engine
    if number == 1:
        return [evaluate()]
    if number == 2:  # of which the second is captured
        return [evaluate() for _ in range(4)]
    if number == 3:  # a step that is left out, then a load
        found = [run(trainer, schedule, 70, training=True), evaluate()]
        state = trainer.wrapper.state_dict()
        with torch.no_grad():
            trainer.wrapper.load_state_dict(
                {
                    name: value * 0.75 if isinstance(value, torch.Tensor) else value
                    for name, value in state.items()
                }
            )
        return found
    if number == 4:  # the program writes what is shown
        trainer.wrapper.synchronize_param_gather()
        with torch.no_grad():
            for pair in engine.pairs:
                pair.sharded._local_tensor.mul_(1.25)
        return [evaluate()]
    return []


def train(trainer: Trainer, schedule: Any) -> tuple[list[float], dict[str, Any]]:
    numbers: list[float] = []
    for number in range(STEPS):
        numbers.append(run(trainer, schedule, number, training=True))
        success, norm, _ = trainer.optimizer.step()
        assert success
        numbers.append(float(norm))
        numbers += between(trainer, schedule, number)
    return numbers, full_weights(trainer)


Launches = list[tuple[bool, str]]
"""Gathers that a trainer launches: whether they are captured, and of which unit."""


def noted(trainer: Trainer, host: HostTorch) -> Launches:
    """Of all that is launched from now on."""
    found: Launches = []
    pipeline = trainer.wrapper.engine.gather
    start = pipeline.start_gather

    def noting(unit: Any, *use: Any) -> None:
        found.append((host.capturing, unit.name.rpartition(".")[2]))
        start(unit, *use)

    pipeline.start_gather = noting
    return found


def graphed(
    case: Case, ddp: dict[str, Any], host: HostTorch, strategy: str = ZERO_3
) -> tuple[Trainer, Any, Launches]:
    trainer = build_trainer(case, strategy, torch.device("cpu"), ddp=ddp)
    engine = trainer.wrapper.engine
    trainer.wrapper.captures = FullIterationGraphs(engine, lambda: host.capturing)
    engine.runtime.is_capturing = lambda: host.capturing
    return trainer, HostIterations(host), noted(trainer, host)


def _trains_alike(
    changes: dict[str, Any], ddp: dict[str, Any], strategy: str = ZERO_3
) -> list[list[str]]:
    """The gathers of each capture."""
    init_megatron()
    case = CASE.but(**changes)
    eager = build_trainer(case, strategy, torch.device("cpu"), ddp=ddp)
    expected = train(eager, get_forward_backward_func())
    host, *patches = host_torch()
    trainer, schedule, launches = graphed(case, ddp, host, strategy)
    with patches[0], patches[1]:
        found = train(trainer, schedule)
        assert all(FullCudaGraphWrapper.cuda_graph.values())
    assert found[0] == expected[0], (changes, found[0], expected[0])
    check_same_bits(found[1], expected[1], str(changes))
    return [
        [unit for _, unit in group]
        for is_captured, group in itertools.groupby(launches, lambda one: one[0])
        if is_captured
    ]


FIRST = ["root", "embedding"]


@on_ranks(2)
def test_replays_train_like_eager_steps_and_a_graph_has_every_gather(rank: int) -> None:
    layers = ["0", "1", "2"]
    head = ["output_layer"]
    backward = [*head, *layers[::-1]]
    training, evaluation = _trains_alike({}, SLOTS)
    assert training == [*FIRST, *layers, *backward, "embedding", *layers, *backward], training
    assert evaluation == [*FIRST, *layers, *head, *FIRST, *layers, *head], evaluation


@pytest.mark.parametrize(
    ("strategy", "more"), (("optim", {}), ("optim_grads", {}), (ZERO_3, {BUDGET: 1000.0}))
)
@on_ranks(2)
def test_weights_that_are_kept_are_gathered_once(
    rank: int, strategy: str, more: dict[str, float]
) -> None:
    training, _ = _trains_alike({}, {**SLOTS, **more}, strategy)
    assert training == [*FIRST, "0", "1", "2", "output_layer"], training


@pytest.mark.full
@on_ranks(2)
def test_tied_embeddings(rank: int) -> None:
    tied = _trains_alike({"tied": True, "microbatches": 1}, SLOTS)
    assert tied[0][:2] == ["root", "0"]
