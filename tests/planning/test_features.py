"""What is turned on beside how a run is sharded: FP8, budgets, wires, offload, Muon, graphs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_fsdp_adapter.cli.estimate import plan_model
from megatron_fsdp_adapter.cli.quantized_options import NVFP4, Quantization
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8, PER_TENSOR
from megatron_fsdp_adapter.planning import prediction
from megatron_fsdp_adapter.planning.configurations import (
    Configuration,
    memory,
    planned,
)
from megatron_fsdp_adapter.planning.features import Features, features_of
from megatron_fsdp_adapter.planning.machine import machine_named
from megatron_fsdp_adapter.planning.models import shape_named
from megatron_fsdp_adapter.planning.prediction import predict, program_of
from megatron_fsdp_adapter.planning.program import COLLECTIVES, PRODUCTS, Kind
from megatron_fsdp_adapter.planning.report import bridge_overrides, megatron_flags
from megatron_fsdp_adapter.planning.search import Wanted, plan
from megatron_fsdp_adapter.planning.shapes import Parallel, listing, units, with_layers
from megatron_fsdp_adapter.planning.step import StepSetup

pytestmark = pytest.mark.once

H200 = machine_named("h200")
SHAPE = replace(with_layers(shape_named("llama3-8b"), 4), seq_length=4096)
LAYERS = replace(with_layers(shape_named("llama3-8b"), 24), seq_length=4096)
FP8 = Features(Quantization(PER_TENSOR))
GIB = 1 << 30
PLAIN = Configuration(2, fused=False)


def with_features(**given) -> Configuration:
    return replace(PLAIN, features=Features(**given))


def step_of(chosen: Configuration, microbatches: int = 1):
    program = program_of(SHAPE, chosen, microbatches, 0, 4)
    begin = [count for name, count in program.marks if name == "step"][1]
    return program.operations[begin:]


def amounts(operations) -> Counter:
    found: Counter = Counter()
    for one in operations:
        found[one.kind] += one.amount
    return found


def test_fp8_weights_halve_what_is_gathered_of_them_and_all_products_but_the_heads():
    plain, fp8 = amounts(step_of(PLAIN)), amounts(step_of(replace(PLAIN, features=FP8)))
    linear = 4 * SHAPE.active_numel(0)
    assert plain[Kind.ALL_GATHER] - fp8[Kind.ALL_GATHER] == pytest.approx(2 * linear, rel=0.01)
    head = 6 * 4096 * SHAPE.vocabulary * SHAPE.gpt.hidden_size
    assert fp8[Kind.PRODUCT] == head and fp8[Kind.FP8_PRODUCT] == plain[Kind.PRODUCT] - head
    labels = {one.label for one in step_of(replace(PLAIN, features=FP8))}
    assert {"largest values of weights", "casts to per_tensor"} < labels
    assert "transposes of FP8 weights" in labels


@pytest.mark.parametrize("form", [PER_TENSOR, BLOCK128, MXFP8])
def test_formats_are_run_by_the_engine_and_counted_like_estimate_does(form):
    chosen = replace(PLAIN, features=Features(Quantization(form)))
    assert any(one.kind in (Kind.FP8_PRODUCT, Kind.BLOCK_PRODUCT) for one in step_of(chosen))
    theirs = plan_model(SHAPE.gpt, 2, torch.bfloat16, quantized=Quantization(form))
    row, precision = STRATEGIES["optim_grads_params"], chosen.features.precision
    mine = planned(SHAPE, chosen).bytes_held(row, precision, 0)
    assert mine == theirs.bytes_held(row, precision, 0)


def test_a_format_without_numbers_is_an_error_that_lists_those_with():
    with pytest.raises(ValueError, match="nvfp4 weights.*mxfp8"):
        step_of(replace(PLAIN, features=Features(Quantization(products=NVFP4))))


@pytest.mark.parametrize(
    ("chosen", "batch", "ms", "gib"),
    [(replace(PLAIN, features=FP8), 2, 311.6, 50.69),
     (replace(PLAIN, copies=True, features=FP8), 2, 292.8, 55.75),
     (replace(PLAIN, copies=True, graph=True, features=FP8), 2, 280.2, 55.79),
     (replace(PLAIN, copies=True, graph=True, features=FP8, fused=True), 2, 269.1, 55.85),
     (replace(PLAIN, features=Features(Quantization(BLOCK128))), 2, 319.0, 50.80),
     (replace(PLAIN, features=FP8), 8, 1069.0, 61.52)],
)  # fmt: skip
def test_time_and_peak_are_what_was_measured(chosen, batch, ms, gib, monkeypatch):
    """Before Adam's kernel was one that clips."""
    monkeypatch.setattr(prediction, "StepSetup", partial(StepSetup, fused_step=False))
    found = predict(LAYERS, chosen, replace(H200, host=1.35), batch)
    assert found.ms == pytest.approx(ms, rel=0.1)
    assert found.peak_bytes / GIB - H200.gpu.reserved_gib == pytest.approx(gib, rel=0.07)


def test_a_budget_keeps_the_units_that_estimate_says_and_saves_their_communication():
    chosen = with_features(budget_gib=2.0)
    kept = planned(SHAPE, chosen).kept(STRATEGIES["optim_grads_params"], chosen.features.precision)
    assert 0 < kept.weights < len(kept.rows)
    less, more = (
        sum(one.kind in COLLECTIVES for one in step_of(one_, 4)) for one_ in (chosen, PLAIN)
    )
    assert less < more
    times = [predict(SHAPE, with_features(budget_gib=gib), H200, 8).ms for gib in (0.0, 2.0, 20.0)]
    assert times == sorted(times, reverse=True)
    every = predict(SHAPE, replace(PLAIN, strategy="optim"), H200, 8).ms
    assert times[-1] == pytest.approx(every, rel=0.02)


def test_graphs_of_layers_leave_the_host_what_is_around_them():
    eager, layers, whole = (
        sum(one.host for one in step_of(chosen))
        for chosen in (PLAIN, with_features(layer_graphs=True), replace(PLAIN, graph=True))
    )
    assert whole < layers < 0.5 * eager


def test_options_of_megatron_are_features_and_come_back_as_flags():
    options = {
        "fp8_format": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": True,
        "fsdp_unsharded_budget_gib": 4.0,
    }  # fmt: skip
    found = features_of(options)
    assert found.quantized.weights is BLOCK128 and found.budget_gib == 4.0
    text = megatron_flags(SHAPE, replace(PLAIN, features=found))
    for words in (
        "--fp8-recipe blockwise", "--fp8-param-gather", "--fsdp-unsharded-budget-gib 4.0",
    ):  # fmt: skip
        assert words in text
    wire = with_features(bf16_wire=True)
    assert "megatron_fsdp_grad_comm_dtype=bf16" in bridge_overrides(SHAPE, wire)


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"budget_gib": -1.0}, "use 0 or more"),
     ({"unit_numel": 9, "layer_graphs": True}, "leave it out"),
     ({"unit_numel": -1}, "0 or more")],
)  # fmt: skip
def test_features_that_exclude_each_other_are_an_error(given, reason):
    with pytest.raises(ValueError, match=reason):
        Features(**given)


def test_a_plan_with_features_tries_only_what_goes_with_them():
    fixed = {"tensor": 1, "pipeline": 1, "recompute": False, "microbatch": 1}
    found = plan(Wanted(SHAPE, H200, 2, 8, 140.0, fixed, 3, Features(budget_gib=1.0)))
    assert {one.configuration.strategy for one in found.predictions} <= {
        "optim_grads", "optim_grads_params"
    }
    assert all(one.configuration.features.budget_gib == 1.0 for one in found.predictions)


def test_experts_are_joined_in_one_parameter_with_all_their_elements():
    shape = replace(with_layers(shape_named("mixtral-8x7b"), 4), seq_length=4096)
    rows, joined = listing(shape, Parallel(expert=2)), units(shape, Parallel(expert=2), 1)
    params = [full for unit in joined for _, full, _ in unit.params]
    assert len(params) < len(rows)
    assert sum(map(math.prod, params)) == sum(math.prod(full) for _, _, full, _ in rows)


def test_products_that_are_fp8_are_products():
    assert {Kind.FP8_PRODUCT, Kind.FP8_GROUPED, Kind.BLOCK_PRODUCT} < set(PRODUCTS)


TWO_LAYERS = 300_000_000
"""Elements: more than one layer has, fewer than two."""


def test_joined_layers_are_gathered_together_and_counted_like_estimate_does():
    chosen = with_features(unit_numel=TWO_LAYERS)
    plain, joined = (
        Counter(one.kind for one in step_of(one_, 1) if one.amount > 1e6)
        for one_ in (PLAIN, chosen)
    )
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        assert joined[kind] < plain[kind]
    model = planned(SHAPE, chosen)
    assert model.order[1:3] == (
        "decoder.layers.0 to decoder.layers.1", "decoder.layers.2 to decoder.layers.3"
    )  # fmt: skip
    row, precision = STRATEGIES["optim_grads_params"], chosen.features.precision
    held = model.bytes_held(row, precision, 0)
    theirs = plan_model(SHAPE.gpt, 2, torch.bfloat16, unit_numel=TWO_LAYERS)
    assert held == theirs.bytes_held(row, precision, 0)
    small = replace(SHAPE, gpt=replace(SHAPE.gpt, vocab_size=1024))
    gathered = [
        planned(small, one).bytes_held(row, precision, 0)["gathered weights"]
        for one in (PLAIN, chosen)
    ]
    assert gathered[1] == pytest.approx(2 * gathered[0], rel=0.01)
    assert f"--suggested-communication-unit-size {TWO_LAYERS}" in megatron_flags(SHAPE, chosen)


def test_small_layers_are_joined_by_default_as_the_wrapper_joins_them(monkeypatch):
    """The engine, `estimate` and the memory of a plan have the same units. Few of them tell all."""
    shape = with_layers(shape_named("llama-1.5b"), 20)
    model = planned(shape, PLAIN)
    assert model.order[1] == "decoder.layers.0 to decoder.layers.1"
    row, precision = STRATEGIES["optim_grads_params"], PLAIN.features.precision
    theirs = plan_model(shape.gpt, 2, torch.bfloat16)
    assert model.bytes_held(row, precision, 0) == theirs.bytes_held(row, precision, 0)
    assert "unit-size" not in megatron_flags(SHAPE, PLAIN)
    apart = with_features(unit_numel=0)
    assert "--suggested-communication-unit-size 0" in megatron_flags(SHAPE, apart)
    for chosen in (
        apart, replace(PLAIN, graph=True), with_features(layer_graphs=True),
        replace(PLAIN, parallel=Parallel(pipeline=2)),
    ):  # fmt: skip
        assert not any(" to " in name for name in planned(shape, chosen).order), chosen.name
    longer = with_layers(shape, 40)
    in_stages = [
        planned(longer, replace(PLAIN, parallel=Parallel(pipeline=2, virtual=count))).order[1]
        for count in (1, 2)
    ]
    assert in_stages == ["decoder.layers.0 to decoder.layers.1", "decoder.layers.0"]
    few, unjoined = (predict(shape, one, H200, 2).ms for one in (PLAIN, apart))
    monkeypatch.setattr(prediction, "MORE", 10)
    assert few == pytest.approx(predict(shape, PLAIN, H200, 2).ms, rel=0.01)
    assert few < unjoined


def test_the_engine_holds_no_more_of_joined_layers_than_is_counted():
    chosen = with_features(unit_numel=TWO_LAYERS)
    shape = with_layers(replace(SHAPE, gpt=replace(SHAPE.gpt, vocab_size=1024)), 5)
    held = planned(shape, chosen).bytes_held(
        STRATEGIES["optim_grads_params"], chosen.features.precision, 0
    )
    passing = program_of(shape, chosen, 1, 0, 5).most_bytes - held["gradient shard"]
    assert 0.99 * held["reduce bucket"] < passing < held["gathered weights"] + held["reduce bucket"]


def test_a_budget_keeps_joined_layers_whole():
    chosen = with_features(unit_numel=TWO_LAYERS, budget_gib=2.0)
    less, more = (
        sum(one.kind in COLLECTIVES for one in step_of(one_, 4))
        for one_ in (chosen, with_features(unit_numel=TWO_LAYERS))
    )
    assert less < more


@pytest.mark.parametrize(
    ("options", "named"),
    [({"tp_comm_overlap": True}, "tp_comm_overlap=True"), ({"fp4": "e2m1"}, "fp4='e2m1'"),
     ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True"),
     ({"chunked_optimizer_state_offload": True}, "chunked_optimizer_state_offload=True"),
     ({"optimizer": "muon"}, "optimizer='muon'"), ({"cpu_offloading": True}, "cpu_offloading"),
     ({"cpu_offloading_num_layers": 3}, "cpu_offloading_num_layers=3"),
     ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm=True"),
     ({"cuda_graph_modules": ["attn"]}, "cuda_graph_modules"),
     ({"cuda_graph_scope": "attn"}, "cuda_graph_scope='attn'")],
)  # fmt: skip
def test_what_is_not_modeled_is_refused_by_name(options, named):
    with pytest.raises(ValueError, match=f"{named}.* is not modeled.*leave it out"):
        features_of(options)
    assert features_of(dict.fromkeys(options) | {"cuda_graph_scope": "full"}) == Features()


MIXTRAL = replace(with_layers(shape_named("mixtral-8x7b"), 4), seq_length=4096)
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
        planned(MIXTRAL, one, 0).bytes_held(STRATEGIES[one.strategy], one.features.precision, 0)
        for one in (zero_3, zero_1)
    )
    assert 2 * numel <= held["compute weights"] < 1.01 * 2 * numel < kept["compute weights"]
    assert held["gradient shard"] > 4 * numel and held["reduce bucket"] < numel
    split = replace(EXPERTS, gpus=4, instances=2, outer_optim=True)
    dense = memory(MIXTRAL, split, H200, 4)["shard of weights"]
    assert 0 < dense < numel
