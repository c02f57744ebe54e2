"""Training under every parallel axis of core gives the numbers of stock DDP under the same axes.

Each axis on four processes with two strategies; axes together, and with everything else, are cells
of the matrix. Not run anywhere: alltoall with expert-tensor parallelism (gloo cannot). Beside the
strategy the rows vary the loss (per token), SwiGLU, tied embeddings, experts without tokens, and
whether the schedule starts reductions and gathers itself.

Guards against traps E4 (scale of expert gradients), E9 (experts without tokens), G8 (EP = DP), T7
(gradients of replicated parameters), G4 and H7 (norms).
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as ps
from torch import nn

from megatron_fsdp_adapter.megatron.optimizer.clipping import params_norm
from megatron_fsdp_adapter.tools.prove.build import coordinates
from tests.lib.gpt.checkpoints import loaded, saved
from tests.lib.gpt.checks import Step, check_gradients
from tests.lib.gpt.gpt import batches, run_passes
from tests.lib.gpt.topologies import (
    TOPOLOGIES,
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    feed_two_experts,
    global_name,
    init_topology,
    run_schedule,
    topology_step,
)
from tests.lib.gpt.variants import ZERO_0, ZERO_1, ZERO_2, ZERO_3, Variant, compare, marked
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "megatron/wrapper/process_groups.py",
    "megatron/wrapper/domains.py",
    "megatron/optimizer/clipping.py",
)

FIRST = (ZERO_0, ZERO_2)
SECOND = (ZERO_1, ZERO_3)


def freeze_stage(first: bool, model: nn.Module) -> None:
    """All weights of the first or the last pipeline stage, whose optimizers then have none."""
    if ps.is_pipeline_first_stage() == first:
        model.requires_grad_(False)


def evaluated_and_trained(trainer: TopologyTrainer, number: int, rank: int) -> Step:
    """The loss is the sum of both."""
    evaluated = run_schedule(trainer, number, forward_only=True)
    step = topology_step(trainer, number)
    return replace(step, loss=step.loss + evaluated)


def resumed(trainer: TopologyTrainer, number: int, rank: int) -> Step:
    """Ours loads what it has saved before its second step."""
    if trainer.strategy is None or number == 0:
        return topology_step(trainer, number)
    with tempfile.TemporaryDirectory() as own:
        root = everyones(own)[0]
        saved(trainer, root)
        loaded(trainer, root)
        return topology_step(trainer, number)


def an_expert_is_idle(ours: Any, reference: TopologyTrainer, strategy: str) -> None:
    gradients = reference.gradients()
    idle = [n for n, g in gradients.items() if ".experts." in n and not g.any()]
    assert any(everyones(bool(idle))), "every expert got tokens"


def _row(topology: Topology | str, strategies: tuple[str, ...], **changes: Any) -> Variant:
    at = topology
    if isinstance(at, str):
        at = TOPOLOGIES[at]
    name = at.name
    for key, value in changes.get("case", {}).items():
        name += f" {key}={value}"
    options = {
        "world": 4,
        "topology": at,
        "compare": "free",
        "steps": 2,
        "drive": evaluated_and_trained,
        **changes,
    }
    name = options.pop("name", name)
    return Variant(name, strategies, **options)


ROWS = [
    _row("tp2", (ZERO_0, ZERO_3), case={"per_token_loss": True}),
    _row("tp2-sp", (ZERO_1, ZERO_2)),
    _row("cp2", FIRST, case={"swiglu": True}),
    _row("ep2-etp2", SECOND),
    _row("pp2", FIRST, case={"per_token_loss": True}),
    _row("pp2-vpp2", SECOND),
    _row("tp2-pp2", FIRST, case={"tied": False}),
    # What core adds up over tensor-parallel ranks does not go over this wire.
    _row(
        "tp2-sp",
        (ZERO_2, ZERO_3),
        name="tp2-sp, bf16 over data-parallel ranks",
        world=2,
        ddp={"megatron_fsdp_grad_comm_dtype": torch.bfloat16},
    ),
]
for _stage, _strategies, _clip in (("first", (ZERO_0, ZERO_3), 0.05), ("last", SECOND, 0.0)):
    ROWS.append(
        _row(
            "pp2",
            _strategies,
            name=f"pp2, {_stage} stage frozen, clip {_clip}",
            case={"tied": False, "clip": _clip},
            change=partial(freeze_stage, _stage == "first"),
            drive=resumed,
        )
    )
for _name, _strategies in (("ep2", (ZERO_0, ZERO_3)), ("ep4", SECOND)):
    ROWS.append(
        _row(
            _name,
            _strategies,
            name=f"{_name}, experts without tokens",
            change=feed_two_experts,
            steps=1,
            expect=an_expert_is_idle,
        )
    )


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_topology(row: Variant, rank: int, seed: int) -> None:
    """Gradients, norm and loss of a step from the same weights; loss, norm and weights after."""
    compare(row, rank, seed)


@pytest.mark.parametrize(
    ("name", "strategy"), [("ep2-pp2", "optim_grads_params"), ("tp2-pp2", "no_shard")]
)
@on_ranks(4)
def test_the_norm_of_weights_counts_each_weight_once(name: str, strategy: str) -> None:
    """Also those of other stages and of other expert-parallel ranks; replicas and copies not."""
    topology = TOPOLOGIES[name]
    init_topology(topology)
    ours = build_topology_trainer(topology, case_for(topology), strategy)
    weights = ours.params()
    mine = {}
    for full_name, param in ours.named_parameters():
        mine[coordinates(param, full_name, 0)] = weights[full_name].square().sum()
    squares = {}
    for part in everyones(mine):
        squares.update(part)
    expected = float(sum(squares.values())) ** 0.5
    assert params_norm(pytest.fail, ours.chunks) == pytest.approx(expected, rel=1e-6)


# The reference is itself what it should be.


@on_ranks(4)
def test_pipelined_reference_is_the_unsplit_model(rank: int) -> None:
    """The interleaved schedule with gloo mixes up activations and gradients if it is set up
    wrongly, for stock DDP as for ours: then they agree on nonsense."""
    topology = TOPOLOGIES["pp2-vpp2"]
    init_topology(topology)
    case = case_for(topology)
    reference = build_topology_trainer(topology, case, None)
    weights = reference.params()
    data_ranks = ps.get_data_parallel_world_size()
    run_schedule(reference, 0)
    mine = {}
    for name, gradient in reference.gradients().items():
        mine[global_name(reference, name)] = (weights[name], gradient)
    whole = {}
    for part in everyones(mine):
        for name, value in part.items():
            whole[f"0.{name}"] = value
    alone = Topology("alone")
    init_topology(alone)
    unsplit = build_topology_trainer(alone, case, None)
    for name, param in unsplit.named_parameters():
        param.data.copy_(whole[name][0])
    data = batches(case, 0, rank % data_ranks, torch.device("cpu"))
    run_passes(unsplit, data)
    exact = unsplit.gradients()
    found = {name: whole[name][1] for name in exact}
    check_gradients(found, exact, f"rank {rank}")
