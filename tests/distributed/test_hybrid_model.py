"""Core's HybridModel (0.18 on): layers of attention, of an MLP and of experts are units, and train
like stock DDP. Mamba layers, whose kernels are CUDA only, are in test_call_habits.py."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest

from megatron_fsdp_adapter.megatron.local_spec import TorchNorm
from tests.distributed import topologies
from tests.distributed.checks import check_loss, check_norm, check_weights
from tests.distributed.gpt import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.topologies import (
    Topology,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)

hybrid_model = pytest.importorskip(
    "megatron.core.models.hybrid.hybrid_model", reason="this megatron-core has no HybridModel"
)

PATTERN = "*-*E"
"""Attention, MLP, attention, experts: each a layer, one a unit."""
LAYERS = {"TransformerLayer", "MLPLayer", "MoETransformerLayer"}


def _trains(rank: int, world: int, topology: Topology) -> None:
    from megatron.core.models.hybrid import hybrid_block

    from tests.distributed.hybrid_stack import stack_of

    init_topology(topology)
    case = case_for(topology, num_layers=len(PATTERN), tied=False)
    original = topologies.model_config

    def model(config: Any, block: Any, **options: Any) -> Any:
        stack = stack_of(
            lambda experts: topologies._layer_spec(
                Topology("", experts=config.num_moe_experts), experts
            )
        )
        return hybrid_model.HybridModel(config, stack, hybrid_layer_pattern=PATTERN, **options)

    def config(*arguments: Any) -> Any:
        return dataclasses.replace(original(*arguments), is_hybrid_model=True)

    with (
        mock.patch.object(topologies, "GPTModel", model),
        mock.patch.object(topologies, "model_config", config),
        mock.patch.object(hybrid_block, "TENorm", TorchNorm),
    ):
        reference = build_topology_trainer(topology, case, None)
        ours = {s: build_topology_trainer(topology, case, s) for s in STRATEGIES}
    for trainer in ours.values():
        units = {unit.name for unit in trainer.chunks[0].engine.units}
        assert units >= {f"decoder.layers.{i}" for i in range(len(PATTERN))}, units
        assert set(trainer.chunks[0].fsdp_unit_modules) >= LAYERS
    for step in range(3):
        expected = topology_step(reference, step)
        for strategy, trainer in ours.items():
            label = f"{strategy}, {topology.name}, step {step}"
            found = topology_step(trainer, step)
            check_loss(found.loss, expected.loss, label)
            check_norm(found.norm, expected.norm, label, 1e-5)
            check_weights(found.weights, expected.weights, label)


@pytest.mark.parametrize("ep", (1, 2))
def test_layers_of_each_kind_train_like_stock_ddp(ep: int) -> None:
    topology = Topology(f"hybrid-ep{ep}", ep=ep, experts=4)
    run_ranks(_trains, 2, topology)
