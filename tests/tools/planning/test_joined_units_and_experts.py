"""Units of small layers, and experts."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.plan.memory import Precision
from megatron_fsdp_adapter.tools.models.spec import Parallel, listing
from megatron_fsdp_adapter.tools.planning.configurations import Configuration, memory, planned
from megatron_fsdp_adapter.tools.planning.machine import machine_named
from megatron_fsdp_adapter.tools.planning.prediction import program_of
from megatron_fsdp_adapter.tools.planning.program import Kind
from megatron_fsdp_adapter.tools.planning.shapes import units
from tests.lib.tools.presets import model_named

CHECKS = (
    "tools/planning/prediction.py",
    "tools/planning/shapes.py",
    "tools/planning/configurations.py",
)

H200 = machine_named("h200")
PLAIN = Configuration(2, fused=False)


def test_experts_are_joined_in_one_parameter_with_all_their_elements():
    rows, joined = listing(MIXTRAL, Parallel(expert=2)), units(MIXTRAL, Parallel(expert=2), 1)
    params = [full for unit in joined for _, full, _ in unit.params]
    assert len(params) < len(rows)
    assert sum(map(math.prod, params)) == sum(math.prod(full) for _, _, full, _ in rows)


def test_small_layers_are_joined_where_the_wrapper_joins_them():
    """Of a stage, in each of its model chunks; in no graph."""
    few, longer = (replace(model_named("llama-1.5b"), num_layers=count) for count in (20, 40))
    for spec, chosen, joined in (
        (few, PLAIN, 2),
        (few, replace(PLAIN, graph=True), 1),
        (few, replace(PLAIN, parallel=Parallel(pipeline=2)), 1),
        (longer, replace(PLAIN, parallel=Parallel(pipeline=2)), 2),
        (longer, replace(PLAIN, parallel=Parallel(pipeline=2, virtual=2)), 1),
    ):
        assert max(unit.layers for unit in planned(spec, chosen).units) == joined, chosen.name


MIXTRAL = replace(model_named("mixtral-8x7b"), num_layers=4, seq_length=4096)
EXPERTS = Configuration(2, Parallel(expert=2), separate_gathers=True)


def test_experts_of_one_rank_are_planned_whole():
    """They are neither gathered nor put in buckets; split instances keep shards of the rest."""
    zero_3, zero_1 = EXPERTS, replace(EXPERTS, strategy="optim")
    assert zero_3.engine.whole == ("expert",)
    assert zero_1.engine.whole == ()
    numel = sum(
        math.prod(shape)
        for unit in units(MIXTRAL, EXPERTS.parallel, 1, 0)
        for _, shape, domain in unit.params
        if domain == "expert"
    )
    passes = []
    for chosen in (zero_3, zero_1):
        passes.append(
            sum(
                one.amount
                for one in program_of(MIXTRAL, chosen, 4, 0, 4).operations
                if one.kind is Kind.MEMORY
            )
        )
    # Of two steps of four microbatches; casts and buckets of experts would be some 190 bytes each.
    assert abs(passes[0] - passes[1]) < 20 * numel
    held, kept = (
        planned(MIXTRAL, one, 0).bytes_held(STRATEGIES[one.strategy], Precision(), 0)
        for one in (zero_3, zero_1)
    )
    assert 2 * numel <= held["compute weights"] < 1.01 * 2 * numel < kept["compute weights"]
    assert held["gradient shard"] > 4 * numel
    assert held["reduce bucket"] < numel
    split = replace(EXPERTS, gpus=4, instances=2, outer_optim=True)
    dense = memory(MIXTRAL, split, H200, 4)["shard of weights"]
    assert 0 < dense < numel
