"""Which modules are gathered together, and which stay whole: parts of layers
(`megatron_fsdp_enable_fine_grained_param_gather`), neighboring layers as one unit
(`suggested_communication_unit_size`), units whose weights, and gradients, are kept over the
microbatches of a step (`fsdp_unsharded_budget_gib`), and domains of one rank, experts with as much
expert as data parallelism or a world of one, of which nothing is sharded.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_fsdp_adapter.core.config import STRATEGIES as STRATEGY_ROWS
from megatron_fsdp_adapter.core.layout import ParamSpec, plan_group, row_granularity
from megatron_fsdp_adapter.core.topology import EXPERT
from megatron_fsdp_adapter.megatron.layers.schedule_plans import OPTION as PLANS
from megatron_fsdp_adapter.megatron.options.ddp_options import unit_numel, unsharded_budget
from megatron_fsdp_adapter.megatron.options.table import UNIT_NUMEL, engine_fields
from megatron_fsdp_adapter.megatron.wrapper.units import chosen_units
from megatron_fsdp_adapter.plan.memory import Precision
from megatron_fsdp_adapter.plan.unsharded_budget import (
    AUTO,
    GIB,
    OwnGroup,
    UnshardedUnits,
    unsharded_units,
)
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from megatron_fsdp_adapter.tools.cli import estimate
from tests.lib.gpt.checks import Step, check_same_bits, check_step
from tests.lib.gpt.estimates import estimated, flags
from tests.lib.gpt.gpt import Case, Trainer, build_trainer, init_megatron
from tests.lib.gpt.memory import measure
from tests.lib.gpt.topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    feed_two_experts,
    init_topology,
    topology_step,
)
from tests.lib.gpt.units import (
    ALL_GIB,
    EP2,
    EP2_CASE,
    FINE,
    KEPT_CASE,
    NEAR,
    RECOMPUTED,
    WEIGHTS_GIB,
    gathered_bytes,
)
from tests.lib.gpt.variants import (
    STRATEGIES,
    ZERO_1,
    ZERO_2,
    ZERO_3,
    Comparison,
    Options,
    Variant,
    compare,
    marked,
)
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "plan/unsharded_budget.py",
    "plan/unit_grouping.py",
    "megatron/options/ddp_options.py",
    "megatron/wrapper/model_plan.py",
    "megatron/wrapper/units.py",
    "megatron/layers/schedule_plans.py",
)

SLOTS = {"fsdp_double_buffer": True}
FINE_SLOTS = {**FINE, **SLOTS}
CLASSES = [TransformerLayer, MLP]
FOUR = Topology("4 experts", experts=4)
TWELVE = Topology("12 experts", experts=12)

# Rows.


def _parts(name: str, strategy: str = ZERO_3, fields: Any = None, **more: Any) -> Variant:
    return Variant(
        name,
        (strategy,),
        topology=FOUR,
        case={"num_layers": 4},
        fields=fields or {},
        reference={"fields": {}},
        compare="free",
        steps=2,
        **more,
    )


PARTS = [
    _parts("parts", ddp=FINE),
    _parts("parts, experts without tokens", ZERO_2, ddp=FINE, change=feed_two_experts),
    _parts("parts in slots, experts without tokens", ddp=FINE_SLOTS, change=feed_two_experts),
    _parts("parts, recomputed", fields=RECOMPUTED, ddp=FINE),
    _parts("parts in slots, recomputed", fields=RECOMPUTED, ddp=FINE_SLOTS),
    _parts("classes of modules", wrapper={"fsdp_unit_modules": CLASSES}),
]
for strategy, ddp, fields in itertools.product(STRATEGIES, (FINE, FINE_SLOTS), ({}, RECOMPUTED)):
    name = f"{strategy}, parts, {ddp is FINE_SLOTS=}, {bool(fields)=}"
    PARTS.append(_parts(name, strategy, fields, ddp=ddp, world=3, full=True))


def layers_of(trainer: Trainer) -> list[str]:
    return [unit.name for unit in trainer.wrapper.engine.units if "layers" in unit.name]


def three_units(ours: Trainer, reference: Trainer, strategy: str) -> None:
    assert len(layers_of(ours)) == 3
    assert len(layers_of(reference)) == ours.case.num_layers


TWO_LAYERS = 6000
"""Elements: more than one layer has, fewer than two."""


def _joined(name: str, strategy: str = ZERO_3, ddp: Options | None = None, **case: Any) -> Variant:
    """Two ranks' sums are the same in either order; norms are sums over other rows, so that nothing
    may be clipped by them."""
    ddp = ddp or {}
    return Variant(
        f"joined, {name}",
        (strategy,),
        case={"num_layers": 5, "microbatches": 2, "clip": 1e9, **case},
        ddp={**ddp, UNIT_NUMEL: TWO_LAYERS},
        compare="bits but norm",
        expect=three_units,
        reference={"strategy": "own", "ddp": {**ddp, UNIT_NUMEL: None}},
    )


JOINED = (
    _joined("plain"),
    _joined("kept gradients", ZERO_1, tied=True),
    _joined("slots", ddp=SLOTS, bf16=True),
    _joined("recomputed by pairs", num_layers=6, recompute="full-2"),
    _joined("recomputed one by one", recompute="full-1"),
    _joined("whole", ddp={BUDGET: 1.0}),
)

SOME_GIB = 60_000 / GIB


def _kept(name: str, gib: float, ddp: Options, reference: str = "own", **more: Any) -> Variant:
    """Kept weights change no bit. Where all gradients are kept the bits are those of `optim`; where
    some are, only these units' sums over microbatches are in another order. With one microbatch
    there is one order."""
    slots = ", slots" if ddp else ""
    same = ddp if reference == "own" else {}
    values: dict[str, Any] = {"case": KEPT_CASE, "compare": "bits"}
    values["reference"] = {"strategy": reference, "ddp": same}
    values.update(more)
    return Variant(f"kept, {name}{slots}", (ZERO_3,), ddp={**ddp, BUDGET: gib}, steps=3, **values)


KEPT = []
for ddp in ({}, SLOTS):
    KEPT.append(_kept("weights", WEIGHTS_GIB, ddp))
    KEPT.append(_kept("some", SOME_GIB, ddp, ZERO_1, compare=NEAR))
KEPT.append(_kept("all", ALL_GIB, {}, ZERO_1))
ONE_MICROBATCH = {**KEPT_CASE, "microbatches": 1}
KEPT.append(_kept("some, one microbatch", SOME_GIB, {}, case=ONE_MICROBATCH))


def _experts(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if ".experts." in name}


def _each_step_and_bits_of_experts(ours: Step, reference: Step, label: str) -> None:
    check_step(ours, reference, label)
    check_same_bits(_experts(ours.gradients), _experts(reference.gradients), label)


def experts_have_no_bucket(ours: TopologyTrainer, reference: Any, strategy: str) -> None:
    groups = [group for chunk in ours.chunks for group in chunk.engine.groups]
    experts = [group for group in groups if group.key.domain == EXPERT]
    assert experts
    for group in experts:
        assert group.grads.bucket is group.grads.main


# Dense gradients are summed in another order, so each step starts from the same weights.
BITS_OF_EXPERTS = Comparison(
    _each_step_and_bits_of_experts, _each_step_and_bits_of_experts, each_step=True
)
WHOLE = []
for strategy, ddp in ((ZERO_2, {}), (ZERO_3, {}), (ZERO_3, SLOTS), (ZERO_3, FINE)):
    option = next(iter(ddp), "plain")
    row = Variant(
        f"experts on one rank, {strategy}, {option}",
        (strategy,),
        topology=EP2,
        case=EP2_CASE,
        ddp=ddp,
        steps=2,
        expect=experts_have_no_bucket,
        compare=BITS_OF_EXPERTS,
    )
    WHOLE.append(row)
EVERYTHING_KEPT = Variant(
    "experts on one rank, everything else kept",
    (ZERO_3,),
    topology=EP2,
    case=EP2_CASE,
    ddp={BUDGET: ALL_GIB},
    steps=2,
    compare="bits but norm",
    reference={"strategy": ZERO_1},
)
WHOLE.append(EVERYTHING_KEPT)


# Where weights are tied, or gradients divided by the tokens, Adam's kernels round otherwise on flat
# buffers of other lengths: then the reference is `optim`.
def _alone(name: str, case: Options, reference: Options | None = None, **more: Any) -> Variant:
    return Variant(
        f"a world of one, {name}",
        (ZERO_2, ZERO_3),
        1,
        case=case,
        compare="bits but norm",
        reference=reference or {},
        **more,
    )


ALONE = (
    _alone("bf16", {"bf16": True}, ddp={"megatron_fsdp_grad_comm_dtype": torch.bfloat16}),
    _alone("tied, loss per token", {"tied": True, "per_token_loss": True}, {"strategy": ZERO_1}),
    _alone("fused", {"bf16": True, "fused": True}),
    _alone("fp16", {"fp16": True}),
)


@pytest.mark.parametrize("row", marked((*PARTS, *JOINED, *KEPT, *WHOLE)))
@on_ranks()
def test_trains_like_its_reference(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)


@pytest.mark.parametrize("row", marked(ALONE))
@on_ranks(whole=True)
def test_a_world_of_one_trains_as_ddp(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)


# Parts of layers: a layer of many experts is not gathered whole.


@on_ranks(2)
def test_experts_are_gathered_one_after_the_other(rank: int) -> None:
    """With the root, the layer around them, and what is gathered ahead."""
    init_topology(TWELVE)
    case = case_for(TWELVE, num_layers=4)

    def most(**options: Any) -> int:
        trainer = build_topology_trainer(TWELVE, case, ZERO_3, **options)
        topology_step(trainer, 0)
        with gathered_bytes(trainer) as taken:
            topology_step(trainer, 1)
        return max(taken)

    layers = most()
    parts = most(ddp=FINE)
    classes = most(fsdp_unit_modules=CLASSES)
    recomputed = most(ddp=FINE, fields=RECOMPUTED)
    assert classes < layers / 2, (classes, layers)
    assert parts < layers / 3, (parts, layers)
    assert recomputed < layers / 3, (recomputed, layers)


class Layer(BaseMoELayer):
    """What the choice of units looks at, without core's construction: grouped experts of
    Transformer Engine's layers; `fused`: operations read their weights without calling them."""

    def __init__(self, fused: bool) -> None:
        nn.Module.__init__(self)
        parts = {"linear_fc1": nn.Linear(2, 2), "activation_func": nn.GELU()}
        self.router = nn.Linear(2, 2)
        self.experts = nn.ModuleDict({**parts, "linear_fc2": nn.Linear(2, 2)})
        self.experts.config = SimpleNamespace(use_transformer_engine_op_fuser=fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_grouped_experts_are_units_by_what_is_called() -> None:
    each = nn.Sequential(Layer(fused=False))
    fused = nn.Sequential(Layer(fused=True))
    names = ["0.experts.linear_fc1", "0.experts.linear_fc2"]
    assert [*chosen_units(each, None, parts=True)] == names
    assert [*chosen_units(fused, None, parts=True)] == ["0.experts"]
    assert not chosen_units(each, None)


@on_ranks(1)
def test_experts_that_return_their_biases_are_refused(rank: int) -> None:
    init_topology(TWELVE)
    with pytest.raises(ValueError, match="with add_bias_linear=True"):
        build_topology_trainer(TWELVE, case_for(TWELVE, bias=True), ZERO_3, ddp=FINE)


# Neighboring layers as one unit.

MANY = Case(num_layers=24, microbatches=1, clip=1e9)
"""Of so many layers two are joined to one unit by default."""


@on_ranks(2)
def test_layers_are_joined_by_default_and_that_is_told(rank: int) -> None:
    """Steps have the bits of units of their own (`JOINED`), and so have checkpoints
    (tests/checkpoint/test_resume.py)."""
    with redirect_stdout(io.StringIO()) as said:
        joined = build_trainer(MANY, ZERO_3, init_megatron())
    pairs = [f"decoder.layers.{at} to decoder.layers.{at + 1}" for at in range(0, 24, 2)]
    assert layers_of(joined) == pairs
    told = "layers are joined by 2 to units of " in said.getvalue()
    assert told == (rank == 0)
    for options in (
        {"ddp": {"chunked_optimizer_state_offload": True}},  # larger units would do harm
        {"fsdp_unit_modules": [TransformerLayer]},
    ):
        alone = build_trainer(MANY, ZERO_3, init_megatron(), **options)
        assert len(layers_of(alone)) == 24


LOCAL_GRAPHS = {"cuda_graph_impl": "local"}
JOINS = [
    ({}, {}, True),
    ({PLANS: True}, {}, False),
    (LOCAL_GRAPHS, {}, False),
    ({"cuda_graph_impl": "full_iteration"}, {}, False),
    ({**LOCAL_GRAPHS, "cuda_graph_scope": "full_iteration"}, {}, False),
    ({"cuda_graph_impl": "none"}, SLOTS, True),
    ({}, {"chunked_optimizer_state_offload": True}, False),
]


@pytest.mark.parametrize(("config", "ddp", "joins"), JOINS)
def test_layers_are_joined_by_default_where_the_host_limits(config, ddp, joins):
    numels = [1000] * 24
    model_config = SimpleNamespace(**config)
    by_default = 1501 if joins else 0
    for asked, expected in ((None, by_default), (0, 0), (7, 7)):
        ddp_config = SimpleNamespace(**ddp, **{UNIT_NUMEL: asked})
        assert unit_numel(model_config, ddp_config, numels) == expected
        assert engine_fields(ddp_config)["prefetch_bytes"] == 2 * (asked or 0)


# Units that are kept.


def layouts_of(rows: int, shards: int = 2) -> list[Any]:
    shape = (rows, 8)
    spec = ParamSpec(0, ("w",), shape, torch.bfloat16, True, row_granularity(shape))
    return [plan_group([spec], shards)]


def kept_of(
    units: Sequence[Sequence[Any]], name: str, budget: int = GIB, forward_only: Sequence[int] = ()
) -> UnshardedUnits:
    """What units of one strategy keep."""
    row = STRATEGY_ROWS[name]
    groups = [[OwnGroup(layout, row) for layout in unit] for unit in units]
    return unsharded_units(groups, row, Precision(), budget, forward_only)


def test_units_that_are_gathered_twice_come_before_those_gathered_once():
    """Six units of one size: the embedding is forward-only, the last one before the root stays."""
    units = [layouts_of(16) for _ in range(6)]
    numel = 16 * 8
    weights = 2 * numel
    for count, expected in ((1, {5}), (3, {5, 1, 2}), (4, {5, 1, 2, 3}), (5, {5, 1, 2, 3, 0})):
        budget = count * weights
        kept = kept_of(units, ZERO_3, budget, forward_only=[0])
        found = {at for at, row in enumerate(kept.rows) if not row.shard_weights}
        assert found == expected
        assert kept.nbytes == budget
    one = kept_of([units[0], []], ZERO_3)
    assert one.nbytes == weights + 4 * (numel - numel // 2)


def test_model_chunks_on_one_device_share_a_budget():
    ddp_config = SimpleNamespace(**{BUDGET: 1.0})
    for chunks, nbytes in ((None, GIB), (4, GIB // 4)):
        config = SimpleNamespace(virtual_pipeline_model_parallel_size=chunks)
        assert unsharded_budget(config, ddp_config) == nbytes


def test_a_strategy_that_shards_nothing_has_nothing_to_keep():
    for name in (ZERO_1, "no_shard"):
        kept = kept_of([layouts_of(8), []], name)
        assert kept.nbytes == 0
        assert {row.name for row in kept.rows} == {name}
    with pytest.raises(ValueError, match=BUDGET):
        kept_of([layouts_of(8)], ZERO_3, -1)


@pytest.mark.parametrize(
    ("dense", "experts"), [(ZERO_3, ZERO_1), (ZERO_1, ZERO_3), ("no_shard", ZERO_2)]
)
def test_a_unit_of_two_strategies_pays_for_what_its_groups_shard(dense, experts):
    """It is kept for the groups that shard something; the others stay as they are."""
    [dense_layout], [expert_layout] = layouts_of(16), layouts_of(48)
    both = [
        OwnGroup(dense_layout, STRATEGY_ROWS[dense]),
        OwnGroup(expert_layout, STRATEGY_ROWS[experts]),
    ]
    sharded, other = (both[0], both[1]) if dense == ZERO_3 else (both[1], both[0])
    alone = unsharded_units([[sharded], []], sharded.row, Precision(), GIB)
    row = STRATEGY_ROWS[dense]
    kept = unsharded_units([both, [other], []], row, Precision(), GIB)
    assert kept.nbytes == alone.nbytes > 0
    assert [one.name for one in kept.rows] == [ZERO_1, other.row.name, dense]
    less = unsharded_units([both, [other], []], row, Precision(), alone.nbytes - 1)
    assert less.rows[0] != kept.rows[0]


def _told(gib: float) -> str:
    with redirect_stdout(io.StringIO()) as said:
        build_trainer(Case(**KEPT_CASE), ZERO_3, init_megatron(), ddp={BUDGET: gib})
    return said.getvalue()


@on_ranks(2)
def test_budgets_take_what_estimate_says(rank: int, world: int) -> None:
    case = Case(**KEPT_CASE)
    found = []
    points = measure(rank, world, case, ZERO_3, ddp={BUDGET: SOME_GIB})
    assert "unsharded over a step" not in _told(0.0)
    for gib in (WEIGHTS_GIB, SOME_GIB, ALL_GIB):
        report = estimated(case, world, rank, {BUDGET: gib})["strategies"][ZERO_3]
        weights = report["kept"]["weights"]
        gradients = report["kept"]["gradients"]
        said = f"weights of {weights} and gradients of {gradients} of 7 units"
        assert (said in _told(gib)) == (rank == 0)
        found.append((weights, gradients))
        if gib == SOME_GIB:
            assert points["second: at rest"] == report["between_steps"]
    assert found[0] == (6, 0)
    assert found[1][0] == 7
    assert 0 < found[1][1] < 7


def test_a_budget_that_is_found_cannot_be_estimated(capsys):
    assert estimate.main(flags(Case(**KEPT_CASE), 2, 0, {BUDGET: AUTO})) == 2
    assert "Give the number of GiB that the run has printed" in capsys.readouterr().err
