"""A memory budget that is found in the first steps (`fsdp_unsharded_budget_gib="auto"`): units are
kept, alike on all ranks, with the bits of units that are kept from the start; and fewer of them
where memory runs out. What a given budget keeps: test_units.py."""

from __future__ import annotations

import functools
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fsdp_adapter.build.auto_budget import AutoBudget
from megatron_fsdp_adapter.core.runtime.device import storage_bytes
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO, GIB
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.gpt.changed_models import inner_model
from tests.lib.gpt.checks import Step
from tests.lib.gpt.gpt import Trainer, batches, forward_step
from tests.lib.gpt.topologies import Topology, TopologyTrainer
from tests.lib.gpt.units import ALL_GIB, EP2, EP2_CASE, KEPT_CASE, NEAR, WEIGHTS_GIB
from tests.lib.gpt.variants import ZERO_1, ZERO_3, Variant, compare, marked, train
from tests.lib.ranks.shared_ranks import on_ranks
from tests.lib.ranks.spare_memory import agree_on, spare

CHECKS = ("build/auto_budget.py", "plan/unsharded_budget.py")

ALL_BYTES = int(ALL_GIB * GIB)


def from_the_first_step(trainer: Trainer | TopologyTrainer) -> None:
    agree_on(trainer.chunks, ALL_BYTES)


def keeps(weights: int, grads: int, budget: int) -> Any:
    """Expects that so many units are kept, alike on all ranks, and take nothing between steps."""

    def check(ours: Trainer, reference: Trainer, strategy: str) -> None:
        engine = ours.wrapper.engine
        assert sum(unit.stays for unit in engine.units) == weights
        assert sum(unit.keeps_grads for unit in engine.units) == grads
        assert engine.budget.chosen_for == budget
        ours.wrapper.zero_grad_buffer()
        ahead = engine.order.first()  # gathered for the next forward
        for unit in engine.units:
            for group in unit.groups:
                assert not storage_bytes(group.grads.bucket.tensor)
                if unit.ordinal not in ahead:
                    for buffer in group.weights.unsharded:
                        assert not storage_bytes(buffer.tensor)

    return check


def raises_in_step_5(trainer: Trainer, number: int, rank: int) -> Step:
    """A forward raises in the middle of our model, on all ranks, before that step."""
    wrapper = trainer.wrapper
    if number == 5 and isinstance(wrapper.engine.budget, AutoBudget):
        layer = next(m for m in wrapper.modules() if isinstance(m, TransformerLayer))
        none_left = mock.patch.object(layer, "forward", side_effect=torch.OutOfMemoryError("none"))
        with none_left, pytest.raises(torch.OutOfMemoryError):
            train(trainer, number, rank)
    return train(trainer, number, rank)


def raises_on_one_rank_in_an_evaluation(trainer: Trainer, number: int, rank: int) -> Step:
    """Of our model, behind the last gather, before step 3."""
    wrapper = trainer.wrapper
    if number == 3 and isinstance(wrapper.engine.budget, AutoBudget):
        data = batches(trainer.case, 9, rank, torch.device("cpu"))
        if rank == 1:
            ends = mock.Mock(side_effect=ValueError)
        else:
            ends = mock.Mock(return_value=None)
        handle = inner_model(wrapper).output_layer.register_forward_hook(ends)
        with nullcontext() if rank == 0 else pytest.raises(ValueError), torch.no_grad():
            forward_step(trainer.case, iter(data), wrapper)
        handle.remove()
    return train(trainer, number, rank)


def _found(
    name: str,
    gib: float,
    kept: tuple[int, int, int],
    failing: range = range(0),
    on: Collection[int] = (1,),
    **more: Any,
) -> Variant:
    """Without `begin` four steps are as without a budget: two before memory is measured, one that
    proposes it, and one in which the proposals are compared."""
    values: dict[str, Any] = {"case": KEPT_CASE, "compare": "bits", "steps": 7}
    values["reference"] = {"strategy": "own"}
    values.update(more)
    return Variant(
        f"found, {name}",
        (ZERO_3,),
        ddp={BUDGET: AUTO},
        expect=keeps(*kept),
        around=functools.partial(spare, int(gib * GIB), failing, on),
        **values,
    )


PP2 = Topology("pp2 vpp2", pp=2, vpp=2)


def chunks_share(ours: TopologyTrainer, reference: TopologyTrainer, strategy: str) -> None:
    """Expects that the chunks of a device have agreed on halves of what it can spare."""
    half = (ALL_BYTES - 8 * torch.distributed.get_rank()) // 2
    assert [chunk.engine.budget.chosen_for for chunk in ours.chunks] == [half, half]


ALL_KEPT = (7, 7, ALL_BYTES - 8)
OPTIM = {"strategy": ZERO_1}
FOUND = [
    _found("weights", WEIGHTS_GIB, (6, 0, 39_192)),
    _found("all", ALL_GIB, ALL_KEPT, compare=NEAR, full=True),
    _found("all, one microbatch", ALL_GIB, ALL_KEPT, case={**KEPT_CASE, "microbatches": 1}),
]
for name, units, case in (
    ("", 7, {}),
    (", fused", 7, {"fused": True}),
    (", recomputed", 7, {"recompute": "full-1"}),
    (", tied", 5, {"tied": True}),
):
    row = _found(
        f"all from the first step{name}",
        ALL_GIB,
        (units, units, ALL_BYTES - 8),
        steps=5,
        begin=from_the_first_step,
        reference=OPTIM,
        case={**KEPT_CASE, **case},
        full=name != ", fused",
    )
    FOUND.append(row)
FOUND += [
    _found(
        "then an allocation fails", WEIGHTS_GIB, (3, 1, 19_584), range(5, 6), compare=NEAR, steps=10
    ),
    _found(
        "then all fail", WEIGHTS_GIB, (0, 0, 0), range(5, 60), compare=NEAR, steps=24, full=True
    ),
    _found(
        "a pass raises, and one rank has run out of memory",
        WEIGHTS_GIB,
        (0, 0, 0),
        range(5, 6),
        drive=raises_in_step_5,
        steps=9,
    ),
    _found(
        "a pass raises", WEIGHTS_GIB, (6, 0, 39_192), drive=raises_in_step_5, steps=9, full=True
    ),
    _found(
        "an evaluation raises on one rank",
        ALL_GIB,
        ALL_KEPT,
        steps=5,
        begin=from_the_first_step,
        reference=OPTIM,
        drive=raises_on_one_rank_in_an_evaluation,
    ),
    _found("nothing is spare", 8 / GIB, (0, 0, 0), full=True),
]
for topology, world in ((EP2, 2), (PP2, 4)):
    row = Variant(
        f"{topology.name}, a budget that is found",
        (ZERO_3,),
        world,
        topology=topology,
        case={**EP2_CASE, "microbatches": 4},
        ddp={BUDGET: AUTO},
        steps=5,
        full=world > 2,
        around=functools.partial(spare, ALL_BYTES),
        begin=from_the_first_step,
        compare="bits but norm",
        reference=OPTIM,
    )
    FOUND.append(row)
OF_CHUNKS = Variant(
    f"{PP2.name}, each chunk takes its part",
    (ZERO_3,),
    topology=PP2,
    case=EP2_CASE,
    ddp={BUDGET: AUTO},
    steps=5,
    around=functools.partial(spare, ALL_BYTES),
    compare="free",
    expect=chunks_share,
    reference={"strategy": ZERO_3},
)
FOUND.append(OF_CHUNKS)


@pytest.mark.parametrize("row", marked(FOUND))
@on_ranks()
def test_trains_like_its_reference(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)
