"""Options of mixtures of experts about where tokens go, when, and which experts get them: training
gives the numbers of stock DDP, which has the plain dispatcher, and nothing overlapped.

DeepEP and HybridEP are stand-ins on gloo (`deep_ep_stand_in.py`): their results, not their kernels
and streams. What the engine asks of modules with streams of their own is in
`tests/engine/test_engine_side_streams.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.moe import moe_layer, token_dispatcher
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_fsdp_adapter import export_weights
from megatron_fsdp_adapter.launch import cpu_mode
from tests.distributed import deep_ep_stand_in
from tests.distributed.checks import FREE, check_loss, check_norm, check_step, check_weights
from tests.distributed.gpt import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.test_topologies import feed_two_experts
from tests.distributed.topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)

STEPS = 2
FEW = ("optim_grads_params",)


@dataclass(frozen=True)
class Option:
    """fields: of our model's config; plain: in their place in the reference's; both: of both."""

    fields: Mapping[str, Any]
    plain: Mapping[str, Any] = field(default_factory=dict)
    both: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] = lambda model: None
    begin: Callable[[Any], None] = lambda trainer: None
    check: Callable[[Any, Any], None] = lambda ours, reference: None


def flex(backend: str) -> dict[str, Any]:
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}


def only_activations_were_given(ours: TopologyTrainer, reference: TopologyTrainer) -> None:
    """No buffer of the engine's was in the dispatcher's hands, which keeps what it is given for its
    backward, and lends it to streams of its own."""
    given = {tensor.untyped_storage().data_ptr() for tensor in deep_ep_stand_in.GIVEN}
    assert given, "the stand-in was not used"
    deep_ep_stand_in.GIVEN.clear()
    groups = [group for chunk in ours.chunks for u in chunk.engine.units for group in u.groups]
    held = [pair.unsharded.untyped_storage().data_ptr() for _, pair in ours._pairs()]
    held += [weights.tensor.untyped_storage().data_ptr() for g in groups for weights in g.weights]
    assert not given & (set(held) - {0})


def biases(trainer: TopologyTrainer) -> list[torch.Tensor]:
    return [value for chunk in trainer.chunks for name, value in chunk.module.named_buffers()
            if name.endswith("expert_bias")]  # fmt: skip


def same_biases(ours: TopologyTrainer, reference: TopologyTrainer) -> None:
    """Bit for bit: core moves them by a fixed step, up or down. Each export of what changed has
    them."""
    mine, theirs = biases(ours), biases(reference)
    exported = dict(export_weights(ours.chunks, which="changed"))
    sent = [value for name, value in exported.items() if name.endswith("expert_bias")]
    assert mine and len(mine) == len(theirs) == len(sent)
    for one, other, found in zip(mine, theirs, sent, strict=True):
        assert one.any() and torch.equal(one, other), (one, other)
        assert torch.equal(one, found), (one, found)


def replay(trainer: TopologyTrainer) -> None:
    """Every router of the process gets the same experts for its tokens, not those of its choice."""
    case, experts = trainer.case, trainer.topology.experts
    assert RouterReplay.global_router_replay_instances and experts
    generator = torch.Generator().manual_seed(case.seed)
    split = trainer.topology.tp if trainer.topology.sp else 1
    scores = torch.rand(case.seq * case.batch // split, experts, generator=generator)
    for router in RouterReplay.global_router_replay_instances:
        router.clear_indices()
        router.set_target_indices(scores.topk(2).indices)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


class Projection(nn.Linear):
    """Of latent experts, in the place of Transformer Engine's layer, which needs a GPU."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, **unused: Any) -> None:
        super().__init__(inputs, outputs, bias)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


SHARED = {"moe_shared_expert_intermediate_size": 12}
FP32 = {"moe_router_dtype": "fp32"}
OPTIONS: Mapping[str, Option] = {
    "flex dispatcher, DeepEP": Option(
        flex("deepep"), both=FP32, check=only_activations_were_given
    ),
    "flex dispatcher, HybridEP": Option(
        flex("hybridep"), both=FP32, check=only_activations_were_given
    ),
    "flex dispatcher, experts without tokens": Option(
        flex("deepep"), both=FP32, change=feed_two_experts
    ),
    "flex dispatcher beside shared experts": Option(
        {**flex("hybridep"), "moe_shared_expert_overlap": True}, both={**FP32, **SHARED},
    ),
    "shared experts overlapped": Option({"moe_shared_expert_overlap": True}, both=SHARED),
    "latent experts": Option({}, both={"moe_latent_size": 10}),
    "expert bias": Option(
        {},
        both={"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
              "moe_router_bias_update_rate": 0.01},
        check=same_biases,
    ),
    "router replay": Option({}, both={"moe_enable_routing_replay": True}, begin=replay),
}  # fmt: skip


def trainer_of(topology: Topology, option: Option, strategy: str | None) -> TopologyTrainer:
    fields = {**option.both, **(option.plain if strategy is None else option.fields)}
    case = case_for(topology, adam_eps=1e-3)
    with (
        mock.patch.object(moe_layer, "HAVE_TE", True),
        mock.patch.object(moe_layer, "TELinear", Projection, create=True),
    ):
        return build_topology_trainer(topology, case, strategy, option.change, fields=fields)


def train_like_ddp(
    rank: int, world: int, topology: Topology, names: list[str], strategies: tuple[str, ...]
) -> list[str]:
    """The first step from the same weights, the others free."""
    init_topology(topology)
    deep_ep_stand_in.install()
    for name in names:
        option = OPTIONS[name]
        for strategy in strategies:
            RouterReplay.clear_global_router_replay_instances()
            reference = trainer_of(topology, option, None)
            ours = trainer_of(topology, option, strategy)
            label = f"{name}, {strategy}, rank {rank}"
            for step in range(STEPS):
                option.begin(ours)
                expected, mine = topology_step(reference, step), topology_step(ours, step)
                if step == 0:
                    check_step(mine, expected, label)
                check_loss(mine.loss, expected.loss, label)
                check_norm(mine.norm, expected.norm, label, FREE)
                check_weights(mine.weights, expected.weights, label)
                option.check(ours, reference)
    return names


def runnable() -> list[str]:
    """Core's flex dispatcher of 0.16.1 takes no shared experts."""
    inherits = "set_shared_experts" not in vars(MoEFlexTokenDispatcher)
    return [name for name in OPTIONS if inherits or name != "flex dispatcher beside shared experts"]


def test_options_of_experts_train_like_ddp_without_them() -> None:
    """Two ranks share out the experts of every rank's tokens; each expert is trained by two."""
    names = runnable()
    topology = Topology("ep2", ep=2, experts=4)
    assert run_ranks(train_like_ddp, 4, topology, names, FEW, timeout=300) == [names] * 4


BUDGET = {
    **flex("hybridep"), "moe_expert_rank_capacity_factor": 0.3,
    "use_transformer_engine_op_fuser": True,  # core asks for it; experts here are not grouped
}  # fmt: skip


def train_with_reruns(rank: int, world: int, strategies: tuple[str, ...]) -> list[int]:
    """Core's runner gives each step too small a budget of tokens first. Returns how often forward
    and backward ran under each strategy."""
    from megatron.core.transformer.moe import paged_stash

    topology = Topology("ep2", ep=2, experts=4)
    init_topology(topology)
    deep_ep_stand_in.install()
    calls = []
    for strategy in strategies:
        reference = trainer_of(topology, Option({}, both=FP32), None)
        ours = trainer_of(topology, Option(BUDGET, both=FP32), strategy)
        counted = mock.Mock(side_effect=get_forward_backward_func())
        with (
            mock.patch.object(paged_stash, "torch", cpu_mode.make_view()),
            # It rounds budgets up to what kernels take, more than all tokens here.
            mock.patch.object(token_dispatcher, "get_align_size_for_quantization", lambda c: 1),
        ):
            runner = paged_stash.PagedStashRunner(
                ours.chunks[0].config, False, ours.chunks, ours.optimizer, counted
            )
            for step in range(STEPS):
                expected = topology_step(reference, step)
                mine = topology_step(ours, step, runner)
                label = f"{strategy}, step {step}, rank {rank}"
                check_loss(mine.loss, expected.loss, label)
                check_norm(mine.norm, expected.norm, label, FREE)
                check_weights(mine.weights, expected.weights, label)
        calls.append(counted.call_count)
    return calls


@pytest.mark.skipif(
    "moe_expert_rank_capacity_factor" not in TransformerConfig.__dataclass_fields__,
    reason="this megatron-core has no moe_expert_rank_capacity_factor",
)
@pytest.mark.parametrize(
    "strategies", (STRATEGIES[1::2], pytest.param(STRATEGIES[::2], marks=pytest.mark.full))
)
def test_a_step_that_core_runs_again_gives_what_one_run_gives(strategies: tuple[str, ...]) -> None:
    """Gradients were finalized once already, of tokens of which some had been dropped."""
    calls = run_ranks(train_with_reruns, 4, strategies, timeout=300)
    assert calls == [[2 * STEPS] * len(strategies)] * 4


@pytest.mark.full
@pytest.mark.parametrize(
    "topology",
    (
        Topology("ep2", ep=2, experts=4),
        Topology("tp2-ep2-etp1", tp=2, ep=2, etp=1, sp=True, experts=4),
    ),
    ids=lambda topology: topology.name,
)
def test_options_of_experts_train_like_ddp_under_every_strategy(topology: Topology) -> None:
    run_ranks(train_like_ddp, 4, topology, runnable(), STRATEGIES, timeout=900)
