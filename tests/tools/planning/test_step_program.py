"""The engine's own step, written down: what it launches, in which order, with which memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron_fsdp_adapter.tools.models.spec import WHOLE, ModelSpec, Parallel
from megatron_fsdp_adapter.tools.planning.configurations import Configuration
from megatron_fsdp_adapter.tools.planning.program import COLLECTIVES, Kind, Operation
from megatron_fsdp_adapter.tools.planning.shapes import units
from megatron_fsdp_adapter.tools.planning.step import record_step

CHECKS = (
    "tools/planning/step.py",
    "tools/planning/program.py",
    "tools/planning/timed_runtime.py",
    "tools/planning/timed_modules.py",
)

SPEC = ModelSpec(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    ffn_hidden_size=256,
    vocab_size=512,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    seq_length=128,
)


def program_of(strategy="optim_grads_params", ranks=4, spec=SPEC, parallel=WHOLE, **given):
    ran = {}
    for name in ("microbatches", "warmup", "steps"):
        if name in given:
            ran[name] = given.pop(name)
    given.setdefault("fused", False)
    chosen = Configuration(ranks, parallel, strategy, **given)
    return record_step(units(spec, parallel, 1), chosen, **ran)


def second_step(**given) -> list[Operation]:
    program = program_of(**given)
    begins = [count for name, count in program.marks if name == "step"]
    return program.operations[begins[1] :]


@pytest.mark.parametrize(
    ("strategy", "microbatches", "gathers", "reductions"),
    [
        ("no_shard", 2, 0, 6),
        ("optim", 2, 6, 6),
        ("optim_grads", 2, 6, 12),
        ("optim_grads_params", 1, 10, 6),
        ("optim_grads_params", 2, 20, 12),
    ],
)
def test_each_strategy_communicates_as_often_as_it_does_in_training(
    strategy, microbatches, gathers, reductions
):
    # 4 layers, embedding and output layer; the last one stays, and an embedding's backward reads
    # no weights. The root's norm is left out as too small.
    step = second_step(strategy=strategy, microbatches=microbatches)
    found = Counter()
    for one in step:
        if one.kind in COLLECTIVES and one.amount > 1e3:
            found[one.kind] += 1
    assert found[Kind.ALL_GATHER] == gathers
    assert found[Kind.REDUCE_SCATTER] + found[Kind.ALL_REDUCE] == reductions


def test_gradients_that_modules_write_are_not_copied():
    def passes(fused: bool) -> float:
        step = second_step(fused=fused)
        return sum(one.amount for one in step if one.kind is Kind.MEMORY)

    assert passes(fused=True) < passes(fused=False)


def test_with_a_graph_only_the_optimizer_costs_the_host():
    costs = {one.part for one in second_step(graph=True) if one.host}
    assert costs <= {"norm", "optimizer", "sync"}


def test_an_outer_axis_is_reduced_once_a_step():
    found = second_step(ranks=8, instances=4, microbatches=3)
    reductions = [one for one in found if one.group == "dense outer" and one.amount > 100]
    assert 5 <= len(reductions) <= 7


def test_experts_have_a_domain_of_their_own_and_gathers_on_their_own_communicators():
    mixture = replace(SPEC, num_experts=8, moe_ffn_hidden_size=128)
    found = second_step(spec=mixture, parallel=Parallel(expert=4), ranks=8, separate_gathers=True)
    used = {(one.group, one.channel) for one in found if one.kind is Kind.ALL_GATHER}
    assert used == {("dense", "dense gathers"), ("expert", "expert gathers")}


def test_experts_have_a_strategy_and_instances_of_their_own():
    """Dense parameters are gathered and reduced in each microbatch, experts once a step."""
    mixture = replace(SPEC, num_experts=8, moe_ffn_hidden_size=128)
    found = second_step(
        spec=mixture,
        parallel=Parallel(expert=2),
        ranks=8,
        microbatches=3,
        expert_strategy="optim",
        expert_instances=2,
    )
    count = Counter((one.group, one.kind) for one in found if one.amount > 100)
    assert count["expert", Kind.ALL_GATHER] == count["expert", Kind.REDUCE_SCATTER] == 4
    assert count["expert outer", Kind.ALL_REDUCE] == 4
    assert count["dense", Kind.REDUCE_SCATTER] >= 3 * 4
    assert not {group for group, _ in count} & {"dense outer"}


def test_a_pipelines_stage_holds_back_backwards_while_it_fills():
    found = second_step(parallel=Parallel(pipeline=2), microbatches=3, warmup=1)
    first = next(i for i, one in enumerate(found) if one.part == "backward")
    attention = [one for one in found[:first] if one.kind is Kind.ATTENTION]
    assert len(attention) == 2 * 2  # of two layers, and two microbatches
