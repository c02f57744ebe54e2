"""Multi-token prediction on the last of two pipeline stages, where the embedding is called too."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)

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


def _with_further_tokens(config: Any, block: Any, **options: Any) -> GPTModel:
    spec = get_gpt_mtp_block_spec(
        config, get_gpt_layer_local_spec(), False, vp_stage=options["vp_stage"]
    )
    return GPTModel(config, block, mtp_block_spec=spec, **options)


def _trains(rank: int, world: int, tied: bool) -> None:
    topology = Topology("pp2-mtp", pp=2)
    init_topology(topology)
    case = case_for(topology, tied=tied)
    original = topologies.model_config

    def config(*arguments: Any) -> Any:
        made = original(*arguments)
        made.mtp_num_layers = 1
        return made

    with mock.patch.object(topologies, "model_config", config), mock.patch.object(
        topologies, "GPTModel", _with_further_tokens
    ):
        reference = build_topology_trainer(topology, case, None)
        ours = {s: build_topology_trainer(topology, case, s) for s in STRATEGIES}
    for step in range(2):
        expected = topology_step(reference, step)
        for strategy, trainer in ours.items():
            label = f"{strategy}, tied {tied}, step {step}"
            found = topology_step(trainer, step)
            check_loss(found.loss, expected.loss, label)
            check_norm(found.norm, expected.norm, label, 1e-5)
            check_weights(found.weights, expected.weights, label)


@pytest.mark.full
@pytest.mark.parametrize("tied", (False, True))
def test_trains_like_stock_ddp(tied: bool) -> None:
    run_ranks(_trains, 4, tied, timeout=240)
