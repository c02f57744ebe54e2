"""What is turned on beside how a run is sharded: FP8, graphs, experts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8, PER_TENSOR
from megatron_fsdp_adapter.models.quantization import Quantization
from megatron_fsdp_adapter.models.spec import Parallel, listing
from megatron_fsdp_adapter.planning import step
from megatron_fsdp_adapter.planning.configurations import (
    Configuration,
    memory,
    planned,
)
from megatron_fsdp_adapter.planning.machine import machine_named
from megatron_fsdp_adapter.planning.prediction import predict, program_of
from megatron_fsdp_adapter.planning.program import PRODUCTS, Kind
from megatron_fsdp_adapter.planning.shapes import units
from tests.planning.presets import model_named

H200 = machine_named("h200")
LAYERS = replace(model_named("llama3-8b"), num_layers=24, seq_length=4096)
SPEC = replace(LAYERS, num_layers=4)
FP8 = Quantization(PER_TENSOR)
GIB = 1 << 30
PLAIN = Configuration(2, fused=False)


def step_of(chosen: Configuration, microbatches: int = 1):
    program = program_of(SPEC, chosen, microbatches, 0, 4)
    begin = [count for name, count in program.marks if name == "step"][1]
    return program.operations[begin:]


def amounts(operations) -> Counter:
    found: Counter = Counter()
    for one in operations:
        found[one.kind] += one.amount
    return found


def test_fp8_weights_halve_what_is_gathered_of_them_and_all_products_but_the_heads():
    plain, fp8 = amounts(step_of(PLAIN)), amounts(step_of(replace(PLAIN, quantized=FP8)))
    linear = 4 * SPEC.active_numel(0)
    assert plain[Kind.ALL_GATHER] - fp8[Kind.ALL_GATHER] == pytest.approx(2 * linear, rel=0.01)
    head = 6 * 4096 * SPEC.embedding_rows * SPEC.hidden_size
    assert fp8[Kind.PRODUCT] == head and fp8[Kind.FP8_PRODUCT] == plain[Kind.PRODUCT] - head
    labels = {one.label for one in step_of(replace(PLAIN, quantized=FP8))}
    assert {"largest values of weights", "casts to per_tensor"} < labels
    assert "transposes of FP8 weights" in labels


@pytest.mark.parametrize("form", [PER_TENSOR, BLOCK128, MXFP8])
def test_formats_are_run_by_the_engine(form):
    found = step_of(replace(PLAIN, quantized=Quantization(form)))
    assert {Kind.FP8_PRODUCT, Kind.BLOCK_PRODUCT} & {one.kind for one in found}
    assert {Kind.FP8_PRODUCT, Kind.FP8_GROUPED, Kind.BLOCK_PRODUCT} < set(PRODUCTS)


PASSES_THEN = (
    (4, "gradient norm", "norm", True), (8, "clip", "norm", False), (28, "Adam", "optimizer", False)
)


@pytest.mark.parametrize(
    ("chosen", "batch", "ms", "gib"),
    [(replace(PLAIN, quantized=FP8), 2, 311.6, 50.69),
     (replace(PLAIN, copies=True, quantized=FP8), 2, 292.8, 55.75),
     (replace(PLAIN, copies=True, graph=True, quantized=FP8), 2, 280.2, 55.79),
     (replace(PLAIN, copies=True, graph=True, quantized=FP8, fused=True), 2, 269.1, 55.85),
     (replace(PLAIN, quantized=Quantization(BLOCK128)), 2, 319.0, 50.80),
     (replace(PLAIN, quantized=FP8), 8, 1069.0, 61.52)],
)  # fmt: skip
def test_time_and_peak_are_what_was_measured(chosen, batch, ms, gib, monkeypatch):
    """Before Adam's kernel was one that clips."""
    monkeypatch.setattr(step, "PASSES", PASSES_THEN)
    found = predict(LAYERS, chosen, replace(H200, host=1.35), batch)
    assert found.ms == pytest.approx(ms, rel=0.1)
    assert found.peak_bytes / GIB - H200.gpu.reserved_gib == pytest.approx(gib, rel=0.07)


def test_experts_are_joined_in_one_parameter_with_all_their_elements():
    rows, joined = listing(MIXTRAL, Parallel(expert=2)), units(MIXTRAL, Parallel(expert=2), 1)
    params = [full for unit in joined for _, full, _ in unit.params]
    assert len(params) < len(rows)
    assert sum(map(math.prod, params)) == sum(math.prod(full) for _, _, full, _ in rows)


def test_small_layers_are_joined_where_the_wrapper_joins_them():
    """Of a stage, in each of its model chunks; in no graph."""
    few, longer = (replace(model_named("llama-1.5b"), num_layers=count) for count in (20, 40))
    for spec, chosen, joined in (
        (few, PLAIN, 2), (few, replace(PLAIN, graph=True), 1),
        (few, replace(PLAIN, parallel=Parallel(pipeline=2)), 1),
        (longer, replace(PLAIN, parallel=Parallel(pipeline=2)), 2),
        (longer, replace(PLAIN, parallel=Parallel(pipeline=2, virtual=2)), 1),
    ):  # fmt: skip
        assert max(unit.layers for unit in planned(spec, chosen).units) == joined, chosen.name


MIXTRAL = replace(model_named("mixtral-8x7b"), num_layers=4, seq_length=4096)
EXPERTS = Configuration(2, Parallel(expert=2), separate_gathers=True)


def test_experts_of_one_rank_are_planned_whole():
    """They are neither gathered nor put in buckets; split instances keep shards of the rest."""
    zero_3, zero_1 = EXPERTS, replace(EXPERTS, strategy="optim")
    assert zero_3.engine.whole == ("expert",) and zero_1.engine.whole == ()
    numel = sum(
        math.prod(shape)
        for unit in units(MIXTRAL, EXPERTS.parallel, 1, 0) for _, shape, domain in unit.params
        if domain == "expert"
    )  # fmt: skip
    passes = [
        sum(one.amount for one in program_of(MIXTRAL, chosen, 4, 0, 4).operations
            if one.kind is Kind.MEMORY)
        for chosen in (zero_3, zero_1)
    ]  # fmt: skip
    # Of two steps of four microbatches; casts and buckets of experts would be some 190 bytes each.
    assert abs(passes[0] - passes[1]) < 20 * numel
    held, kept = (
        planned(MIXTRAL, one, 0).bytes_held(STRATEGIES[one.strategy], one.precision, 0)
        for one in (zero_3, zero_1)
    )
    assert 2 * numel <= held["compute weights"] < 1.01 * 2 * numel < kept["compute weights"]
    assert held["gradient shard"] > 4 * numel and held["reduce bucket"] < numel
    split = replace(EXPERTS, gpus=4, instances=2, outer_optim=True)
    dense = memory(MIXTRAL, split, H200, 4)["shard of weights"]
    assert 0 < dense < numel
