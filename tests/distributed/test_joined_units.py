"""`suggested_communication_unit_size`: neighbouring layers as one unit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fsdp_adapter.megatron.options.ddp_options import UNIT_NUMEL
from megatron_fsdp_adapter.megatron.schedule_plans import OPTION, problems
from tests.distributed.checks import check_run_bits, free_run
from tests.distributed.gpt import Case, build_trainer, init_megatron
from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.once

CASE = Case(num_layers=5, microbatches=2, clip=1e9)
"""Two ranks' sums are the same in either order; norms are sums over other rows, so that nothing may
be clipped by them."""
TWO_LAYERS = 6000
"""Elements: more than one layer has, fewer than two."""

CELLS: dict[str, tuple[Case, str | None, dict[str, Any]]] = {
    "plain": (CASE, "optim_grads_params", {}),
    "kept gradients": (CASE.but(tied=True), "optim", {}),
    "slots": (CASE.but(bf16=True), "optim_grads_params", {"fsdp_double_buffer": True}),
    "recomputed by pairs": (CASE.but(num_layers=6, recompute="full-2"), "optim_grads_params", {}),
    "recomputed one by one": (CASE.but(recompute="full-1"), "optim_grads_params", {}),
    "whole": (CASE, "optim_grads_params", {"fsdp_unsharded_budget_gib": 1.0}),
}


def _train_all(rank: int, world: int) -> None:
    device = init_megatron()
    for name, (case, strategy, ddp) in CELLS.items():
        runs = []
        for numel in (TWO_LAYERS, None):
            trainer = build_trainer(case, strategy, device, ddp={**ddp, UNIT_NUMEL: numel})
            names = [unit.name for unit in trainer.wrapper.engine.units if "layers" in unit.name]
            assert len(names) == (3 if numel else case.num_layers), names
            runs.append(free_run(trainer, rank, 3, device))
        check_run_bits(*runs, name)


def test_joined_layers_train_like_units_of_their_own():
    run_ranks(_train_all, 2, timeout=200)


def test_core_schedule_of_parts_of_layers_refuses_joined_layers():
    config = SimpleNamespace(**{OPTION: True})
    plain = SimpleNamespace(data_parallel_sharding_strategy="optim_grads")
    joined = SimpleNamespace(**vars(plain), **{UNIT_NUMEL: 1000})
    assert problems(config, plain) == []
    (said,) = problems(config, joined)
    assert UNIT_NUMEL in said and "leave" in said
