"""Units that stay unsharded over a step, for a budget that is given or found while training, and
layers that are joined to units, in loops of the user's own: they change no bit where they change no
order of sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.build import auto_budget
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO, GIB, KEEPING
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.gpt.checks import check_same_bits, check_weights
from tests.lib.plain.plain import Block, Side, net
from tests.lib.plain.plain_loops import LOOPS
from tests.lib.ranks.shared_ranks import on_ranks
from tests.lib.ranks.spare_memory import agree_on, spare

CHECKS = (
    "build/auto_budget.py",
    "plan/unsharded_budget.py",
    "plan/unit_grouping.py",
    "plain/building.py",
    "plain/fully_shard.py",
    "plain/user_loop.py",
)

NUMEL = "suggested_communication_unit_size"
ZERO_1, ZERO_2, ZERO_3 = "optim", "optim_grads", "optim_grads_params"

ALL_BYTES = GIB


@dataclass
class Found(Side):
    """With a budget that is found, enough for all units, and agreed on before the first step.
    keeping: what units may keep."""

    keeping: Sequence[str] = KEEPING

    def model(self, module: nn.Module | None = None, **options: Any) -> Any:
        with mock.patch.object(auto_budget, "KEEPING", self.keeping):
            made = super().model(module, **{BUDGET: AUTO}, **options)
        agree_on([made], ALL_BYTES)
        return made

    def kept(self) -> tuple[int, int]:
        """The number of units of the last model that keep weights, and gradients."""
        units = self.models[-1].engine.units
        return sum(unit.stays for unit in units), sum(unit.keeps_grads for unit in units)


def weights_of(side: Side, name: str) -> dict[str, torch.Tensor]:
    with spare(ALL_BYTES):
        LOOPS[name](side)
    return side.weights()


SOME_LOOPS = (
    "microbatches_and_clipping",
    "an_optimizer_every_other_step",
    "a_block_left_out_at_times",
)


@pytest.mark.parametrize("names", (SOME_LOOPS, pytest.param(None, marks=pytest.mark.full)))
@on_ranks(2, seconds=400)
def test_weights_that_stay_change_no_bit(rank: int, world: int, names: Any) -> None:
    """However the loop clears gradients, and whether it has microbatches."""
    for name in names or LOOPS:
        if name.startswith("a_rank_without"):
            continue  # it does not run with sharded weights
        plain = Side(rank, world, ZERO_3)
        found = Found(rank, world, ZERO_3, keeping=KEEPING[:1])
        expected = weights_of(plain, name)
        check_same_bits(weights_of(found, name), expected, name)
        assert found.numbers == plain.numbers, name
        weights, grads = found.kept()
        assert grads == 0, name
        if names:  # after a backward that raised nothing is kept for two steps
            assert weights == len(found.models[-1].engine.units), name


KEPT_GRADS: dict[str, tuple[str, str, bool]] = {
    "microbatches_and_clipping": (ZERO_3, ZERO_1, True),
    "optimizers_of_torch": (ZERO_2, ZERO_1, True),
    # Of one backward in each step: there is one order of sums.
    "gradients_that_the_program_clears": (ZERO_3, ZERO_3, True),
    "cleared_between_forward_and_backward": (ZERO_3, ZERO_3, True),
    "steps_that_raise": (ZERO_3, ZERO_3, True),
    # Gradients that were reduced are added to: then none are kept.
    "an_optimizer_every_other_step": (ZERO_3, ZERO_3, False),
    "gradients_replaced_between_backwards": (ZERO_3, ZERO_3, False),
}
"""Loop -> a strategy, the one with whose bits it then trains, and whether gradients are kept."""


@pytest.mark.parametrize("name", KEPT_GRADS)
@on_ranks(2, seconds=400)
def test_gradients_that_stay_are_summed_as_under_zero_1(rank: int, world: int, name: str) -> None:
    strategy, like, keeps = KEPT_GRADS[name]
    found = Found(rank, world, strategy)
    expected = weights_of(Side(rank, world, like), name)
    check_same_bits(weights_of(found, name), expected, name)
    weights, grads = found.kept()
    count = len(found.models[-1].engine.units)
    assert weights == (count if strategy == ZERO_3 else 0)
    assert grads == (count if keeps else 0)


@pytest.mark.full
@pytest.mark.parametrize("strategy", (ZERO_2, ZERO_3))
@on_ranks(2, seconds=400)
def test_every_loop_trains_to_the_same_weights(rank: int, world: int, strategy: str) -> None:
    for name in LOOPS:
        if name == "a_rank_without_microbatches" or (
            name == "a_rank_without_data" and strategy == ZERO_3
        ):
            continue
        expected = weights_of(Side(rank, world, None), name)
        found = Found(rank, world, strategy)
        check_weights(weights_of(found, name), expected, name, 2e-5)


@pytest.mark.full
@pytest.mark.parametrize("outer", ("no_shard", "optim"))
@on_ranks(4, seconds=400)
def test_units_are_kept_over_replicas_too(rank: int, world: int, outer: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    options = {"mesh": mesh, "outer_dp_sharding_strategy": outer}
    for name in ("optimizers_of_torch", "gradients_that_the_program_clears"):
        expected = weights_of(Side(rank, world, ZERO_3, options), name)
        weights = Found(rank, world, ZERO_3, options, keeping=KEEPING[:1])
        check_same_bits(weights_of(weights, name), expected, name)
        everything = Found(rank, world, ZERO_3, options)
        check_weights(weights_of(everything, name), expected, name, 2e-5)


@on_ranks(2)
def test_a_budget_is_found_in_the_third_step_and_halved_when_memory_runs_out(rank: int) -> None:
    """A step counts once, also if several of its backwards are compared."""
    steps = []
    with spare(ALL_BYTES, failing=range(14, 15)):
        side = Side(rank, 2, ZERO_3, {BUDGET: AUTO})
        for step, model, optimizer in several_steps(side, 10):
            for microbatch in range(2):
                side.loss(model, step, microbatch).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(model.engine.budget.chosen_for)
    assert steps[:3] == [0, 0, ALL_BYTES - 8]
    assert 0 < steps[-1] < 100_000


def several_steps(side: Side, count: int) -> Any:
    model = side.model()
    optimizer = side.sgd(model.parameters())
    for step in range(count):
        yield step, model, optimizer


@on_ranks(2)
def test_a_given_budget_and_joined_layers_change_no_bit(rank: int) -> None:
    """With a number of GiB gradients are summed as under ZeRO-1; joined layers are one unit."""
    name = "optimizers_of_torch"
    kept = Side(rank, 2, ZERO_3, {BUDGET: 1.0})
    check_same_bits(weights_of(kept, name), weights_of(Side(rank, 2, ZERO_1), name), BUDGET)
    assert all(unit.keeps_weights for unit in kept.models[-1].engine.units)
    joined = Side(rank, 2, ZERO_3, {NUMEL: 10_000})
    check_same_bits(weights_of(joined, name), weights_of(Side(rank, 2, ZERO_3), name), NUMEL)
    names = [unit.name for unit in joined.models[-1].engine.units]
    assert "blocks.0 to blocks.1" in names


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({BUDGET: "some"}, f"{BUDGET}='some': it must be a number of GiB .*'auto'"),
    "negative": ({BUDGET: -1.0}, f"{BUDGET}=-1.0: it must be a number of GiB"),
    "nothing to keep": (
        {BUDGET: AUTO, "data_parallel_sharding_strategy": ZERO_1},
        f"{BUDGET}='auto': this strategy shards neither gradients nor weights. Use",
    ),
    "negative size": ({NUMEL: -1}, f"{NUMEL}=-1: the number of elements"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(alone: Any, name: str) -> None:
    options, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        fully_shard_model(net(), None, [Block], **options)
