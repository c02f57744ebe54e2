"""What a plan says of Muon: whole matrices, on the ranks that exchange them, by the real owners."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron_fsdp_adapter.cli.estimate import plan_model
from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.diagnostics.memory import (
    GATHERED_WEIGHTS,
    MUONS_MATRICES,
    REDUCE_BUCKET,
)
from megatron_fsdp_adapter.planning.configurations import (
    ACTIVATIONS,
    Configuration,
    at_its_most,
    planned,
)
from megatron_fsdp_adapter.planning.features import Features
from megatron_fsdp_adapter.planning.models import shape_named
from megatron_fsdp_adapter.planning.prediction import program_of
from megatron_fsdp_adapter.planning.program import Kind
from megatron_fsdp_adapter.planning.shapes import Parallel, with_layers
from megatron_fsdp_adapter.sharding.muon import owners
from megatron_fsdp_adapter.sharding.muon.newton_schulz import cost

pytestmark = pytest.mark.once

SHAPE = replace(with_layers(shape_named("llama3-8b"), 4), seq_length=4096)
MIXTURE = replace(with_layers(shape_named("mixtral-8x7b"), 2), seq_length=4096)
TWO = Configuration(2, fused=False, features=Features(optimizer="muon"))
LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3]
"""Of Llama-3 8B: queries, keys, values, output, gate, up, and down, which costs the same."""


def amounts(chosen: Configuration, shape=SHAPE, layers: int = 4) -> Counter:
    program = program_of(shape, chosen, 1, 0, layers)
    begin = [count for name, count in program.marks if name == "step"][1]
    found: Counter = Counter()
    for one in program.operations[begin:]:
        found[one.kind] += one.amount
        found[one.label.partition(" of ")[0]] += 1
    return found


def most_of(costs: list[int], ranks: int) -> int:
    return max(owners.loads(costs, owners.assign(costs, ranks), ranks))


def test_what_is_fused_is_taken_apart() -> None:
    costs = [cost(*matrix) for matrix in LAYER * 4]
    assert amounts(replace(TWO, gpus=1))[Kind.ITERATION] == sum(costs)
    assert amounts(TWO)[Kind.ITERATION] == pytest.approx(most_of(costs, 2))


def test_matrices_are_whole_over_tensor_parallel_ranks_who_own_them_too() -> None:
    split = replace(TWO, parallel=Parallel(tensor=2))
    assert amounts(split)[Kind.ITERATION] == pytest.approx(amounts(TWO)[Kind.ITERATION])


def test_every_rank_owns_some_where_all_have_the_weights() -> None:
    """They send no rows, and get all updates."""
    found = amounts(replace(TWO, strategy="no_shard"))
    sharded = amounts(TWO)
    assert found[Kind.ITERATION] == sharded[Kind.ITERATION]
    assert found["rows"] == 0 and found["updates"] == sharded["updates"] == sharded["rows"] == 4
    assert found[Kind.EXCHANGE] == pytest.approx(2 * 4 * SHAPE.active_numel(0), rel=1e-3)


def test_experts_that_no_other_rank_has_are_the_work_of_their_own() -> None:
    eight = replace(TWO, gpus=8)
    apart = replace(eight, parallel=Parallel(expert=8))
    expert = 3 * cost(14336, 4096)
    attention = [cost(*matrix) for matrix in LAYER[:4] * 2]
    wanted = 2 * expert + most_of(attention, 8)
    assert amounts(apart, MIXTURE, 2)[Kind.ITERATION] == pytest.approx(wanted)
    together = [*attention, *[cost(14336, 4096)] * 3 * 8 * 2]
    found = amounts(eight, MIXTURE, 2)[Kind.ITERATION]
    assert found == pytest.approx(most_of(attention, 8) + most_of(together[8:], 8))


def test_a_few_layers_of_many_stand_for_the_owners_of_all() -> None:
    """With as many ranks as matrices of four layers each rank would have one at most."""
    many = with_layers(SHAPE, 24)
    found = amounts(replace(TWO, gpus=16), many)[Kind.ITERATION]
    assert found == pytest.approx(most_of([cost(*m) for m in LAYER * 24], 16) * 4 / 24)


def test_memory_is_what_estimate_says_and_grows_with_whole_matrices() -> None:
    row, precision = STRATEGIES["optim_grads_params"], TWO.features.precision
    theirs = plan_model(SHAPE.gpt, 2, torch.bfloat16).bytes_held(row, precision, 0)
    assert planned(SHAPE, TWO).bytes_held(row, precision, 0) == theirs
    split = planned(SHAPE, replace(TWO, gpus=4, parallel=Parallel(tensor=2)))
    whole = planned(SHAPE, replace(TWO, gpus=4))
    assert split.bytes_held(row, precision, 0)[MUONS_MATRICES] == pytest.approx(
        whole.bytes_held(row, precision, 0)[MUONS_MATRICES]
    )
    matrices = {MUONS_MATRICES: theirs[MUONS_MATRICES]}
    most = at_its_most({**theirs, GATHERED_WEIGHTS: 0, REDUCE_BUCKET: 0}, 1 << 20, False)
    assert matrices.items() <= most.items() and ACTIVATIONS not in most
