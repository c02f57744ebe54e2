"""Training under every parallel axis of core gives the numbers of stock DDP under the same axes.

Four processes, three microbatches, each topology with two strategies by default, so that every
axis meets all four:

                tp2  tp2-sp  cp2  ep2  ep4  ep2-etp2  pp2  pp2-vpp2  tp2-pp2  ep2-pp2
    no_shard    x            x         x              x              x
    optim            x            x         x              x                  x
    optim_grads      x       x         x              x              x
    ..._params  x                 x         x              x                  x

The cells without a cross are not covered by default: tp2 with optim and optim_grads, tp2-sp with
no_shard and optim_grads_params, cp2 and ep4 and pp2 and tp2-pp2 with optim and optim_grads_params,
ep2 and ep2-etp2 and pp2-vpp2 and ep2-pp2 with no_shard and optim_grads. They run with `--full`,
with and without overlap, and so do eight processes. Not run anywhere: alltoall with
expert-tensor parallelism (gloo cannot), grouped GEMM (needs a GPU).
Beside the strategy the default cells vary the loss (per token), SwiGLU, tied embeddings, overlap,
and whether the schedule starts reductions and gathers itself.

Guards against traps E4 (scale of expert gradients), E9 (experts without tokens), G8 (EP = DP), T7
(gradients of replicated parameters), G4 and H7 (norms).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import nn

from megatron_fsdp_adapter.megatron.domains import SHARED_EMBEDDING
from tests.distributed import topologies
from tests.distributed.checks import (
    FREE,
    check_gradients,
    check_loss,
    check_norm,
    check_step,
    check_weights,
)
from tests.distributed.gpt import STRATEGIES, batches
from tests.distributed.launch import run_ranks
from tests.distributed.topologies import (
    TOPOLOGIES,
    Topology,
    TopologyTrainer,
    build_chunk,
    build_topology_trainer,
    case_for,
    init_topology,
    run_schedule,
    topology_step,
)
from tests.distributed.topology_faults import FAULTS

WORLD = 4
FIRST, SECOND = ("no_shard", "optim_grads"), ("optim", "optim_grads_params")


def feed_two_experts(model: nn.Module) -> None:
    """All tokens become alike to the router: two of the experts get all of them, the others none,
    and with one expert a rank some ranks get no token at all."""
    for name, param in model.named_parameters():
        if name.endswith("pre_mlp_layernorm.weight"):
            param.data.zero_()


@dataclass(frozen=True)
class Cell:
    """A topology with some strategies. `case` changes the case, `change` the bare model."""

    topology: Topology
    strategies: tuple[str, ...]
    case: dict[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], None] | None = None
    steps: int = 2

    @property
    def name(self) -> str:
        parts = [self.topology.name, *(f"{k}={v}" for k, v in self.case.items())]
        return " ".join(parts + ([self.change.__name__] if self.change else []))


def _cell(name: str, strategies: tuple[str, ...], **options: Any) -> Cell:
    return Cell(TOPOLOGIES[name], strategies, **options)


DEFAULT = (
    _cell("tp2", ("no_shard", "optim_grads_params"), case={"per_token_loss": True}),
    _cell("tp2-sp", ("optim", "optim_grads")),
    _cell("cp2", FIRST, case={"swiglu": True}),
    _cell("ep2", SECOND, case={"swiglu": True}),
    _cell("ep4", FIRST),
    _cell("ep2-etp2", SECOND),
    _cell("pp2", FIRST, case={"per_token_loss": True}),
    _cell("pp2-vpp2", SECOND),
    _cell("tp2-pp2", FIRST, case={"tied": False}),
    _cell("ep2-pp2", SECOND, case={"overlap": False}),
    _cell("ep2", ("no_shard", "optim_grads_params"), change=feed_two_experts, steps=1),
    _cell("ep4", SECOND, change=feed_two_experts, steps=1),
)

FOUR = tuple(
    Cell(topology, STRATEGIES, case={"overlap": overlap}, steps=6)
    for topology in TOPOLOGIES.values()
    for overlap in (True, False)
)

EIGHT = tuple(
    Cell(topology, STRATEGIES)
    for topology in (
        *TOPOLOGIES.values(),
        Topology("tp2-ep2-pp2", tp=2, ep=2, pp=2, sp=True, experts=4, dispatcher="allgather"),
        Topology("tp2-cp2-pp2", tp=2, cp=2, pp=2),
        Topology("pp4", pp=4),
        Topology("ep2-etp1-tp2", tp=2, ep=2, etp=1, sp=True, experts=4),
    )
)

Outcome = dict[str, dict[str, str]]
"""Cell and strategy -> what a rank found wrong; empty if nothing."""


def check_layouts(trainer: TopologyTrainer) -> None:
    """Tensor-parallel ranks hold the same elements of every parameter, and the stages that share
    an embedding the same of that, empty shards included: core reduces shard by shard; collective.
    """
    held = {name: pair.sharded.megatron_fsdp_slice for name, pair in trainer._pairs()}
    assert _everywhere_same(held, ps.get_tensor_model_parallel_group()), held
    embedding = [
        (pair.sharded.megatron_fsdp_slice, pair.sharded._local_tensor.numel())
        for _, pair in trainer._pairs()
        if pair.group.key.domain == SHARED_EMBEDDING
    ]
    group = ps.get_embedding_group(False)  # None on the stages between
    has_copy = trainer.case.tied and group is not None and dist.get_world_size(group) > 1
    assert len(embedding) == int(has_copy), embedding
    if embedding:
        assert _everywhere_same(embedding, group), embedding


def _everywhere_same(value: Any, group: Any) -> bool:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return all(other == value for other in values)


def _found(check: Callable[..., None], *args: Any) -> str:
    try:
        check(*args)
    except AssertionError as error:
        return str(error) or repr(error)
    return ""


def _check_free(mine: Any, theirs: Any, label: str) -> None:
    check_loss(mine.loss, theirs.loss, label)
    check_norm(mine.norm, theirs.norm, label, FREE)
    check_weights(mine.weights, theirs.weights, label)


def _run_cell(cell: Cell, rank: int) -> dict[str, str]:
    """The first step starts from the reference's weights, and so does the last of many; the others
    run free. The last is evaluated before it is trained."""
    init_topology(cell.topology)
    case = case_for(cell.topology, **cell.case)
    change = cell.change or (lambda model: None)
    reference = build_topology_trainer(cell.topology, case, None, change)
    ours = {s: build_topology_trainer(cell.topology, case, s, change) for s in cell.strategies}
    found = {strategy: _found(check_layouts, trainer) for strategy, trainer in ours.items()}
    for step in range(cell.steps):
        weights = reference.weights()
        last = step == cell.steps - 1
        from_reference = step == 0 or (last and cell.steps > 2)
        evaluated = run_schedule(reference, step, forward_only=True) if last else 0.0
        expected = topology_step(reference, step)
        for strategy, trainer in ours.items():
            if from_reference:
                trainer.load(weights)
            if last:
                loss = run_schedule(trainer, step, forward_only=True)
                found[strategy] += _found(check_loss, loss, evaluated, "evaluation")
            mine = topology_step(trainer, step)
            check = check_step if from_reference else _check_free
            label = f"{cell.name} {strategy} step {step} rank {rank}"
            found[strategy] = found[strategy] or _found(check, mine, expected, label)
    if cell.change is feed_two_experts:
        idle = [n for n, g in expected.gradients.items() if ".experts." in n and not g.any()]
        assert _any_rank(bool(idle)), "every expert got tokens"
    return found


def _any_rank(value: bool) -> bool:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return any(values)


def _run_cells(rank: int, world: int, cells: tuple[Cell, ...]) -> Outcome:
    return {cell.name: _run_cell(cell, rank) for cell in cells}


def _merged(outcomes: list[Outcome]) -> Outcome:
    """What the first rank that found something says."""
    return {
        cell: {s: next((o[cell][s] for o in outcomes if o[cell][s]), "") for s in found}
        for cell, found in outcomes[0].items()
    }


@pytest.fixture(scope="module")
def default_outcome() -> Outcome:
    """All cells in one set of processes: starting them takes longer than a cell."""
    return _merged(run_ranks(_run_cells, WORLD, DEFAULT, timeout=300.0))


@pytest.mark.parametrize("cell", DEFAULT, ids=lambda cell: cell.name)
def test_topology(default_outcome: Outcome, cell: Cell) -> None:
    """Gradients, norm and loss of a step from the same weights; loss, norm and weights after."""
    found = default_outcome[cell.name]
    assert set(found) == set(cell.strategies)
    assert not any(found.values()), found


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "cells"), ((4, FOUR), (8, EIGHT)), ids=("4-processes", "8-processes")
)
def test_whole_matrix(world: int, cells: tuple[Cell, ...]) -> None:
    outcome = _merged(run_ranks(_run_cells, world, cells, timeout=1800.0))
    wrong = {cell: found for cell, found in outcome.items() if any(found.values())}
    assert not wrong, wrong


def test_every_cell_is_covered_once() -> None:
    """By default or with --full; the table above says which by default."""
    lines = [line.split() for line in (__doc__ or "").splitlines() if line.startswith("    ")]
    assert lines[0] == list(TOPOLOGIES)
    crosses = {row[0].replace("..._params", STRATEGIES[3]): len(row) - 1 for row in lines[1:]}
    cells = [(s, c.topology.name) for c in DEFAULT if not c.change for s in c.strategies]
    assert crosses == {s: sum(s == other for other, _ in cells) for s in STRATEGIES}
    assert len(set(cells)) == len(cells) == 2 * len(TOPOLOGIES)
    assert {c.topology.name for c in FOUR} == set(TOPOLOGIES)
    assert all(set(c.strategies) == set(STRATEGIES) for c in (*FOUR, *EIGHT))


# The reference is itself what it should be, and the checks can fail.


def _global_name(name: str, topology: Topology, num_layers: int) -> str:
    """A parameter's name in the unsplit model; `name` begins with the number of the chunk."""
    chunk, _, local = name.partition(".")
    if not local.startswith("decoder.layers."):
        return local
    number, _, rest = local.removeprefix("decoder.layers.").partition(".")
    stages = topology.pp * topology.num_chunks
    stage = int(chunk) * topology.pp + ps.get_pipeline_model_parallel_rank()
    return f"decoder.layers.{int(number) + stage * num_layers // stages}.{rest}"


def _unsplit_gradients(
    topology: Topology, weights: dict[str, torch.Tensor], data_ranks: int
) -> dict[str, torch.Tensor]:
    """Of the whole model on this rank alone, over all microbatches of all data-parallel ranks."""
    case, alone = case_for(topology), Topology("alone")
    model = build_chunk(alone, case, topologies.model_config(alone, case), 0)
    params = dict(model.named_parameters())
    for name, param in params.items():
        param.data.copy_(weights[name])
    for data_rank in range(data_ranks):
        for tokens in batches(case, 0, data_rank, torch.device("cpu")):
            output, loss_func = topologies.forward_step(case, iter([{"tokens": tokens}]), model)
            (loss_func(output)[0] / case.microbatches / data_ranks).backward()
    return {name: param.grad for name, param in params.items() if param.grad is not None}


def _compare_with_unsplit(rank: int, world: int, name: str) -> None:
    topology = TOPOLOGIES[name]
    init_topology(topology)
    case = case_for(topology)
    reference = build_topology_trainer(topology, case, None)
    weights, data_ranks = reference.weights(), ps.get_data_parallel_world_size()
    run_schedule(reference, 0)
    mine = {
        _global_name(name, topology, case.num_layers): (weights[name], gradient)
        for name, gradient in reference.gradients().items()
    }
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, mine)
    whole = {name: value for part in parts for name, value in part.items()}
    init_topology(Topology("alone"))
    exact = _unsplit_gradients(topology, {n: w for n, (w, _) in whole.items()}, data_ranks)
    check_gradients({n: whole[n][1] for n in exact}, exact, f"{name} rank {rank}")


def test_pipelined_reference_is_the_unsplit_model() -> None:
    """The interleaved schedule with gloo mixes up activations and gradients if it is set up
    wrongly, for stock DDP as for ours: then they agree on nonsense."""
    run_ranks(_compare_with_unsplit, WORLD, "pp2-vpp2")


def _run_faults(rank: int, world: int) -> dict[str, dict[str, tuple[str, str]]]:
    """Fault and strategy -> what the check says without and with the fault."""
    outcome: dict[str, dict[str, tuple[str, str]]] = {}
    for name, fault in FAULTS.items():
        topology = TOPOLOGIES[fault.topology]
        init_topology(topology)
        case = case_for(topology)
        expected = topology_step(build_topology_trainer(topology, case, None), 0)
        outcome[name] = {}
        for strategy in fault.strategies:
            sound = build_topology_trainer(topology, case, strategy)
            before = _found(check_step, topology_step(sound, 0), expected, "sound")
            faulty = build_topology_trainer(topology, case, strategy)
            fault.inject(faulty)
            after = _found(check_step, topology_step(faulty, 0), expected, name)
            outcome[name][strategy] = (before, after)
    return outcome


@pytest.fixture(scope="module")
def fault_outcomes() -> list[dict[str, dict[str, tuple[str, str]]]]:
    return run_ranks(_run_faults, WORLD)


@pytest.mark.parametrize("name", FAULTS)
def test_checks_see_a_fault(fault_outcomes: list[Any], name: str) -> None:
    for strategy in FAULTS[name].strategies:
        results = [outcome[name][strategy] for outcome in fault_outcomes]
        assert not any(before for before, _ in results), (name, strategy, results)
        assert any(after for _, after in results), (name, strategy)
