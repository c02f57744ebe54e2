"""`suggested_communication_unit_size`: neighboring layers as one unit."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)
from megatron_fsdp_adapter.megatron.options.unit_grouping import (
    UNIT_NUMEL,
    prefetch_bytes,
    unit_numel,
)
from megatron_fsdp_adapter.megatron.schedule_plans import OPTION, problems
from tests.distributed.checks import check_run_bits, free_run
from tests.distributed.gpt import Case, Trainer, build_trainer, init_megatron
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


MANY = CASE.but(num_layers=24, microbatches=1)
"""Of so many layers two are joined to one unit where nobody says."""


def _layers_of(trainer: Trainer) -> list[str]:
    return [unit.name for unit in trainer.wrapper.engine.units if "layers" in unit.name]


def _by_default(rank: int, device: torch.device, root: str) -> None:
    """A checkpoint of layers that are units of their own goes into joined ones."""
    apart = build_trainer(MANY, "optim_grads_params", device, ddp={UNIT_NUMEL: 0})
    assert len(_layers_of(apart)) == 24
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        joined = build_trainer(MANY, "optim_grads_params", device)
    assert _layers_of(joined) == [
        f"decoder.layers.{number} to decoder.layers.{number + 1}" for number in range(0, 24, 2)
    ]
    assert ("layers are joined by 2 to units of " in said.getvalue()) == (rank == 0)
    check_run_bits(free_run(joined, rank, 1, device), free_run(apart, rank, 1, device), "default")
    free_run(apart, rank, 2, device)
    save_checkpoint(root, 1, training_state([apart.wrapper], apart.optimizer))
    state = training_state([joined.wrapper], joined.optimizer, is_loading=True)
    _, state = load_checkpoint(root, state)
    load_training_state([joined.wrapper], state, joined.optimizer)
    check_run_bits(free_run(joined, rank, 2, device), free_run(apart, rank, 2, device), "resumed")


def _apart(device: torch.device) -> None:
    """Where single layers are asked for, or larger units would do harm."""
    for ddp, wrapper in (
        ({"chunked_optimizer_state_offload": True}, {}),
        ({}, {"fsdp_unit_modules": [TransformerLayer]}),
    ):
        trainer = build_trainer(MANY, "optim_grads_params", device, ddp=ddp, **wrapper)
        assert len(_layers_of(trainer)) == 24, ddp


def _train_all(rank: int, world: int, root: str) -> None:
    device = init_megatron()
    _by_default(rank, device, root)
    _apart(device)
    for name, (case, strategy, ddp) in CELLS.items():
        runs = []
        for numel in (TWO_LAYERS, None):
            trainer = build_trainer(case, strategy, device, ddp={**ddp, UNIT_NUMEL: numel})
            assert len(_layers_of(trainer)) == (3 if numel else case.num_layers)
            runs.append(free_run(trainer, rank, 3, device))
        check_run_bits(*runs, name)


def test_joined_layers_train_like_units_of_their_own(tmp_path: Path):
    run_ranks(_train_all, 2, str(tmp_path), timeout=200)


def test_core_schedule_of_parts_of_layers_refuses_joined_layers():
    config = SimpleNamespace(**{OPTION: True})
    plain = SimpleNamespace(data_parallel_sharding_strategy="optim_grads")
    joined = SimpleNamespace(**vars(plain), **{UNIT_NUMEL: 1000})
    assert problems(config, plain) == []
    (said,) = problems(config, joined)
    assert UNIT_NUMEL in said and "leave" in said
    assert problems(config, SimpleNamespace(**vars(plain), **{UNIT_NUMEL: 0})) == []


@pytest.mark.parametrize(
    ("config", "ddp", "joins"),
    [({}, {}, True), ({OPTION: True}, {}, False), ({"cuda_graph_impl": "local"}, {}, False),
     ({"cuda_graph_impl": "full_iteration"}, {}, False),
     ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, {}, False),
     ({"cuda_graph_impl": "none"}, {"fsdp_double_buffer": True}, True),
     ({}, {"chunked_optimizer_state_offload": True}, False)],
)  # fmt: skip
def test_layers_are_joined_by_default_where_the_host_limits(config, ddp, joins):
    numels = [1000] * 24
    for asked, expected in ((None, 1501 if joins else 0), (0, 0), (7, 7)):
        ddp_config = SimpleNamespace(**ddp, **{UNIT_NUMEL: asked})
        assert unit_numel(SimpleNamespace(**config), ddp_config, numels) == expected
        assert prefetch_bytes(ddp_config) == 2 * (asked or 0)
