"""Units of small layers, and experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

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
    parallel = Parallel(expert=2)
    rows = [math.prod(full) for _, _, full, _ in listing(MIXTRAL, parallel)]
    params = []
    for unit in units(MIXTRAL, parallel, 1):
        params += [math.prod(full) for _, full, _ in unit.params]
    assert len(params) < len(rows)
    assert sum(params) == sum(rows)


def test_small_layers_are_joined_where_the_wrapper_joins_them():
    """Of a stage, in each of its model chunks; in no graph."""

    def joined(layers: int, **given: Any) -> int:
        spec = replace(model_named("llama-1.5b"), num_layers=layers)
        model = planned(spec, replace(PLAIN, **given))
        return max(unit.layers for unit in model.units)

    two_stages = Parallel(pipeline=2)
    two_chunks = Parallel(pipeline=2, virtual=2)
    assert joined(20) == 2
    assert joined(20, graph=True) == 1
    assert joined(20, parallel=two_stages) == 1
    assert joined(40, parallel=two_stages) == 2
    assert joined(40, parallel=two_chunks) == 1


MIXTRAL = replace(model_named("mixtral-8x7b"), num_layers=4, seq_length=4096)
EXPERTS = Configuration(2, Parallel(expert=2), separate_gathers=True)


def test_experts_of_one_rank_are_planned_whole():
    """They are neither gathered nor put in buckets; split instances keep shards of the rest."""
    zero_3 = EXPERTS
    zero_1 = replace(EXPERTS, strategy="optim")
    assert zero_3.engine.whole == ("expert",)
    assert zero_1.engine.whole == ()
    numel = 0
    for unit in units(MIXTRAL, EXPERTS.parallel, 1, 0):
        for _, shape, domain in unit.params:
            if domain == "expert":
                numel += math.prod(shape)

    passes = []
    for chosen in (zero_3, zero_1):
        operations = program_of(MIXTRAL, chosen, 4, 0, 4).operations
        amounts = [one.amount for one in operations if one.kind is Kind.MEMORY]
        passes.append(sum(amounts))
    # Of two steps of four microbatches; casts and buckets of experts would be some 190 bytes each.
    assert abs(passes[0] - passes[1]) < 20 * numel

    def bytes_held(chosen: Configuration) -> dict[str, int]:
        row = STRATEGIES[chosen.strategy]
        return planned(MIXTRAL, chosen, 0).bytes_held(row, Precision(), 0)

    held = bytes_held(zero_3)
    kept = bytes_held(zero_1)
    assert 2 * numel <= held["compute weights"]
    assert held["compute weights"] < 1.01 * 2 * numel
    assert kept["compute weights"] > 1.01 * 2 * numel
    assert held["gradient shard"] > 4 * numel
    assert held["reduce bucket"] < numel

    split = replace(EXPERTS, gpus=4, instances=2, outer_optim=True)
    found = memory(MIXTRAL, split, H200, 4)
    assert 0 < found["shard of compute weights"] < numel
