"""Mixtures of experts train like stock DDP: options about where tokens go, when, and which experts
get them; parts of layers that core runs by itself; experts of other tensor-parallel sizes.

The reference has the plain dispatcher. HybridEP is a stand-in on gloo (`deep_ep_stand_in.py`): its
results, not its kernels and streams. What the engine asks of modules with streams of their own:
tests/core/engine/test_engine_scenarios.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.moe import moe_layer, token_dispatcher
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from megatron_fsdp_adapter import export_weights
from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.tools.prove.build import coordinates
from tests.lib.gpt import deep_ep_stand_in
from tests.lib.gpt.checks import Step, check_gradients, check_number
from tests.lib.gpt.delayed_weights import delay_weight_gradients
from tests.lib.gpt.host_offload import storages
from tests.lib.gpt.topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    feed_two_experts,
    init_topology,
    run_schedule,
    topology_step,
)
from tests.lib.gpt.units import FINE, RECOMPUTED, gathered_bytes, nbytes
from tests.lib.gpt.variants import (
    STRATEGIES,
    ZERO_0,
    ZERO_3,
    Comparison,
    Variant,
    compare,
    marked,
    unchanged,
)
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.one_rank import as_one_of_many
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "megatron/layers/schedule_plans.py",
    "core/engine/scheduled_pass.py",
    "megatron/wrapper/domains.py",
    "megatron/wrapper/units.py",
)

EP2 = Topology("ep2", ep=2, experts=4)
SPLIT = Topology("tp2-ep2-etp1", tp=2, ep=2, etp=1, sp=True, experts=4)


# Options of the dispatcher and the router.


FLEX = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}


def only_activations_were_given(ours: Any, reference: Any, strategy: str) -> None:
    """No buffer of the engine's was in the dispatcher's hands, which keeps what it is given for its
    backward, and lends it to streams of its own."""
    given = {tensor.untyped_storage()._cdata for tensor in deep_ep_stand_in.GIVEN}
    assert given, "the stand-in was not used"
    for chunk in ours.chunks:
        assert not (given & storages(chunk))


def biases(named: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([value for name, value in named if name.endswith("expert_bias")])


def same_biases(ours: TopologyTrainer, reference: TopologyTrainer, strategy: str) -> None:
    """Bit for bit: core moves them by a fixed step, up or down. An export of what changed has
    them."""
    mine = biases(ours.chunks[0].module.named_buffers())
    theirs = biases(reference.chunks[0].module.named_buffers())
    assert mine.any()
    assert torch.equal(mine, theirs)
    assert torch.equal(mine, biases(export_weights(ours.chunks, which="changed")))


def replayed(trainer: TopologyTrainer, number: int, rank: int) -> Step:
    """Every router of the process gets the same experts for its tokens, not those of its choice."""
    case = trainer.case
    experts = trainer.topology.experts
    assert RouterReplay.global_router_replay_instances
    assert experts
    generator = torch.Generator().manual_seed(case.seed)
    split = trainer.topology.tp if trainer.topology.sp else 1
    scores = torch.rand(case.seq * case.batch // split, experts, generator=generator)
    for router in RouterReplay.global_router_replay_instances:
        router.clear_indices()
        router.set_target_indices(scores.topk(2).indices)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return topology_step(trainer, number)


class Projection(nn.Linear):
    """Of latent experts, in the place of Transformer Engine's layer, which needs a GPU."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, **unused: Any) -> None:
        super().__init__(inputs, outputs, bias)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


@contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, core finds HybridEP, projections of latent experts, no routers of earlier models."""
    deep_ep_stand_in.install()
    deep_ep_stand_in.GIVEN.clear()
    RouterReplay.clear_global_router_replay_instances()
    with (
        mock.patch.object(moe_layer, "HAVE_TE", True),
        mock.patch.object(moe_layer, "TELinear", Projection, create=True),
    ):
        yield
    RouterReplay.clear_global_router_replay_instances()


def _option(name: str, fields: Any, both: Any, **more: Any) -> Variant:
    """`both`: fields that the reference has too."""
    return Variant(
        name,
        (ZERO_3,),
        4,
        EP2,
        fields={**both, **fields},
        reference={"fields": both},
        around=stand_ins,
        compare="free",
        steps=2,
        **more,
    )


SHARED = {"moe_shared_expert_intermediate_size": 12}
FP32 = {"moe_router_dtype": "fp32"}
OPTIONS = tuple(
    row
    for row in (
        _option("HybridEP", FLEX, FP32, expect=only_activations_were_given),
        _option("HybridEP, experts without tokens", FLEX, FP32, change=feed_two_experts),
        _option(
            "flex dispatcher beside shared experts",
            {**FLEX, "moe_shared_expert_overlap": True},
            {**FP32, **SHARED},
        ),
        _option("shared experts overlapped", {"moe_shared_expert_overlap": True}, SHARED),
        _option("shared experts, recomputed", RECOMPUTED, SHARED),
        _option("latent experts", {}, {"moe_latent_size": 10}),
        _option(
            "expert bias",
            {},
            {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": 0.01,
            },
            expect=same_biases,
        ),
        _option("router replay", {}, {"moe_enable_routing_replay": True}, drive=replayed),
    )
    # Core's flex dispatcher of 0.16.1 takes no shared experts.
    if "beside" not in row.name or "set_shared_experts" not in vars(MoEFlexTokenDispatcher)
)


@contextmanager
def exact_budgets() -> Iterator[None]:
    """Inside, budgets of tokens are not rounded up to what kernels take, more than all tokens."""
    stash = import_module("megatron.core.transformer.moe.paged_stash")
    with (
        stand_ins(),
        mock.patch.object(stash, "torch", cpu_mode.make_view()),
        mock.patch.object(token_dispatcher, "get_align_size_for_quantization", lambda c: 1),
    ):
        yield


def run_by_core_again(trainer: Any) -> None:
    """Core's runner gives each step too small a budget of tokens first."""
    stash = import_module("megatron.core.transformer.moe.paged_stash")
    trainer.counted = mock.Mock(side_effect=get_forward_backward_func())
    trainer.runner = stash.PagedStashRunner(
        trainer.chunks[0].config, False, trainer.chunks, trainer.optimizer, trainer.counted
    )


def by_the_runner(trainer: Any, number: int, rank: int) -> Step:
    """A step by core's runner where there is one; the reference has none."""
    runner = getattr(trainer, "runner", None)
    return topology_step(trainer, number, runner)


def each_step_ran_twice(ours: Any, reference: Any, strategy: str) -> None:
    assert ours.counted.call_count == 2 * 2


RERUN = _option(
    "a step that core runs again",
    {
        **FLEX,
        "moe_expert_rank_capacity_factor": 0.3,
        "use_transformer_engine_op_fuser": True,
    },  # core asks for it; experts here are not grouped
    FP32,
    needs=("moe_expert_rank_capacity_factor",),
).but(
    "a step that core runs again",
    around=exact_budgets,
    begin=run_by_core_again,
    drive=by_the_runner,
    expect=each_step_ran_twice,
    compare="loosely",
)
"""Gradients were finalized once already, of tokens of which some had been dropped."""


# Parts of layers that core runs (`overlap_moe_expert_parallel_comm`), of two microbatches in turn.

OVERLAP = {"overlap_moe_expert_parallel_comm": True, "bf16": True}
DELAY = {"delay_wgrad_compute": True}
KNOWN_BY_DDP = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
DELAY_OF_DDP = DELAY if "delay_wgrad_compute" in KNOWN_BY_DDP else {}


@contextmanager
def host_tensors() -> Iterator[None]:
    """Tensors on the host are on no stream."""
    with mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None):
        yield


def note_calls(trainer: Any) -> None:
    """Of what is called of the layers: whole layers, or parts of them."""
    trainer.seen = seen = set[str]()
    for chunk in trainer.chunks:
        for name, child in chunk.named_modules():
            if name.endswith(("layers.1", "layers.1.self_attention")):
                short = name.rsplit(".", 1)[-1]
                child.register_forward_pre_hook(lambda *_, short=short: seen.add(short))


def parts_are_called(ours: Any, reference: Any, strategy: str) -> None:
    """And an evaluation gives the reference's loss."""
    assert ours.topology is not EP2 or ours.seen == {"self_attention"}, "parts are called"
    ours.load(reference.params())
    losses = [run_schedule(one, 9, forward_only=True) for one in (ours, reference)]
    check_number(*losses, "evaluation: loss")


def delay_all(model: Any) -> None:
    model.late = delay_weight_gradients(model)


def gradients_came_late(ours: Any, reference: Any, strategy: str) -> None:
    parts_are_called(ours, reference, strategy)
    late = []
    for chunk in ours.chunks:
        for m in chunk.modules():
            if hasattr(m, "late"):
                late.append(m.late)
    assert late
    assert all(late)


def _rounded(ours: Step, reference: Step, label: str) -> None:
    check_gradients(ours.gradients, reference.gradients, label, 2**-7)
    check_number(ours.loss, reference.loss, f"{label}: loss")


def _overlapped(name: str, fields: Any = None, delays: bool = False, **more: Any) -> Variant:
    both = {**OVERLAP, **(fields or {})}
    options = {
        "topology": EP2,
        "fields": both,
        "case": {"bf16": True},
        "begin": note_calls,
        "expect": parts_are_called,
    }
    if delays:
        ddp = more.pop("ddp", {})
        options["fields"] = {**both, **DELAY}
        options["change"] = delay_all
        options["expect"] = gradients_came_late
        options["ddp"] = {**ddp, **DELAY_OF_DDP}
    options.update(more)
    return Variant(
        name, around=host_tensors, reference={"fields": both, "change": unchanged}, **options
    )


BF16 = {"bf16": True}
SHARED_20 = {"moe_shared_expert_intermediate_size": 20}
EARLY = {"ep_overlap_early_attn_memory_release": True}
INTERLEAVED = Topology("ep2-pp2-vpp2", ep=2, pp=2, vpp=2, experts=4, aligned=True)
PARTS = (
    *(_overlapped(f"parts, {n} microbatches", case={**BF16, "microbatches": n}) for n in (1, 3)),
    _overlapped("parts, weight gradients that come later", delays=True),
    _overlapped("parts, experts are units", ddp=FINE, case={**BF16, "microbatches": 2}),
    _overlapped(
        "parts, experts are units, later weight gradients",
        delays=True,
        ddp=FINE,
        case={**BF16, "microbatches": 2},
        full=True,
    ),
    # Two graphs make the gradients. Autograd adds them up in bfloat16, which rounds once; stock
    # DDP takes each away by itself.
    _overlapped(
        "parts, a tied weight",
        case={**BF16, "tied": True},
        compare=Comparison(*[_rounded] * 2, each_step=True),
    ),
    _overlapped(
        "parts, one unit of all layers",
        strategies=(ZERO_3,),
        steps=2,
        wrapper={"fsdp_unit_modules": [TransformerBlock]},
    ),
    *(
        _overlapped(
            f"parts, {name}, units {'parts' if ddp else 'layers'}", fields, ddp=ddp, full=True
        )
        for name, fields in (("shared experts", SHARED_20), ("early release", EARLY))
        for ddp in ({}, FINE)
    ),
    *(
        _overlapped(
            f"parts, interleaved pipeline, units {'parts' if ddp else 'layers'}",
            ddp=ddp,
            topology=INTERLEAVED,
            world=4,
            full=True,
        )
        for ddp in ({}, FINE)
    ),
)

DISPATCHED = (
    *OPTIONS,
    RERUN.but(RERUN.name, strategies=STRATEGIES[1::2]),
    RERUN.but(f"{RERUN.name}, other strategies", strategies=STRATEGIES[::2], full=True),
    *(
        row.but(
            f"{row.name}, {topology.name}, every strategy",
            topology=topology,
            strategies=STRATEGIES,
            full=True,
        )
        for row in OPTIONS
        for topology in (EP2, SPLIT)
    ),
)


@pytest.mark.parametrize("row", marked(DISPATCHED))
@on_ranks()
def test_options_of_experts_train_like_stock_ddp(row: Variant, rank: int, seed: int) -> None:
    """Of four ranks two share out the experts of every rank's tokens; each expert is trained by
    two."""
    compare(row, rank, seed)


@pytest.mark.parametrize("row", marked(PARTS))
@on_ranks()
def test_parts_of_core_train_like_stock_ddp(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)


@on_ranks(2)
def test_a_pass_gathers_what_it_reads_and_the_next_stage(rank: int) -> None:
    """Of one microbatch, what one pass reads and the next stage; of several, twice that."""
    topology = Topology("ep2 of 12 experts", ep=2, experts=12)
    init_topology(topology)
    for microbatches, passes in ((1, 1), (3, 2)):
        case = case_for(topology, bf16=True, num_layers=6, microbatches=microbatches)
        for ddp in ({}, FINE):
            with host_tensors():
                with as_one_of_many():  # experts of two ranks are kept whole
                    trainer = build_topology_trainer(
                        topology, case, ZERO_3, ddp=ddp, fields=OVERLAP
                    )
                run_schedule(trainer, 0)
                with gathered_bytes(trainer) as taken:
                    run_schedule(trainer, 1)
            units = trainer.chunks[0].engine.units
            experts = sum(nbytes(unit) for unit in units if "layers.1.mlp.experts" in unit.name)
            others = max(nbytes(unit) for unit in units[:-1] if ".experts" not in unit.name)
            assert (experts > others) == (ddp is FINE), "most of a layer are its experts"
            allowed = nbytes(units[-1]) + passes * (2 * others + experts)
            assert max(taken) <= allowed, (microbatches, ddp, max(taken), others, experts)


# Experts and dense layers of different tensor-parallel sizes.


@pytest.mark.parametrize("world", (2, 4))
@on_ranks()
def test_fewer_expert_tensor_ranks_train_like_stock_ddp_or_are_refused(
    rank: int, world: int, seed: int
) -> None:
    """With one expert-parallel rank: like stock DDP where core marks their weights as experts'
    (0.19 on), and refused where it marks them as dense ones, which is wrong under any wrapper."""
    topology = Topology("tp2-etp1", tp=2, etp=1, sp=True, experts=4)
    row = Variant("", topology=topology)
    case = row.case_of(seed)
    device = row.start()
    model = row.trainer(None, case, device).chunks[0]
    if any(p.allreduce for name, p in model.named_parameters() if ".experts." in name):
        with pytest.raises(ValueError, match="expert_tensor_parallel_size=1 with tensor_model_par"):
            row.trainer("optim", case, device)
    else:
        compare(row, rank, seed)


@pytest.mark.parametrize("strategy", (ZERO_0, ZERO_3))
# From 0.18 on core gives the optimizer of 'no_shard' the model-parallel ranks: with EP2 one.
@pytest.mark.parametrize("topology", (SPLIT, EP2), ids=lambda topology: topology.name)
@on_ranks(2)
def test_biases_of_experts_are_in_the_norm(rank: int, topology: Topology, strategy: str) -> None:
    """Each expert's parameters count once. Core of 0.16.1 looks at the dense rank for experts too
    and leaves out their biases; so the reference is the sum over the gradients themselves."""
    init_topology(topology)
    trainer = build_topology_trainer(topology, case_for(topology, bias=True, clip=1e9), strategy)
    run_schedule(trainer, 0)
    gradients = trainer.gradients()
    mine = {}
    for name, pair in trainer._pairs():
        mine[coordinates(pair.unsharded, name, 0)] = float(gradients[name].double().square().sum())
    biases = [place for place in mine if "experts" in place[0] and "fc2.bias" in place[0]]
    assert biases, "what core leaves out is not in this model"
    whole = {}
    for piece in everyones(mine):
        whole.update(piece)
    success, norm, _ = trainer.optimizer.step()
    assert success
    assert float(norm) == pytest.approx(math.sqrt(sum(whole.values())), rel=1e-5)
