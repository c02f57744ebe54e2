"""Units below a layer: a layer of many experts is not gathered whole, and trains as if it were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_fsdp_adapter.checkpoint.dcp import load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.core.engine.buffer import FlatBuffer
from megatron_fsdp_adapter.core.engine.unit import Unit
from megatron_fsdp_adapter.megatron.units import chosen_units
from tests.distributed.checks import FREE, check_loss, check_norm, check_step, check_weights
from tests.distributed.gpt import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.distributed.test_topologies import feed_two_experts
from tests.distributed.topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    topology_step,
)

EXPERTS, ZERO_3, STEPS = 12, "optim_grads_params", 2
TOPOLOGY = Topology("12 experts", experts=EXPERTS)
PARTS = {"megatron_fsdp_enable_fine_grained_param_gather": True}
SLOTS = {**PARTS, "fsdp_double_buffer": True}
CLASSES = [TransformerLayer, MLP]
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@contextmanager
def gathered_bytes(trainer: TopologyTrainer) -> Iterator[list[int]]:
    """Inside, appends the bytes of gathered weights that there are each time some are taken."""
    units = [unit for chunk in trainer.chunks for unit in chunk.engine.units]
    buffers = [buffer for unit in units for group in unit.groups for buffer in group.weights]
    found: list[int] = []
    allocate = FlatBuffer.allocate

    def counted(self: FlatBuffer) -> None:
        allocate(self)
        if any(self is buffer for buffer in buffers):
            found.append(sum(buffer.nbytes for buffer in buffers if buffer.allocated))

    with mock.patch.object(FlatBuffer, "allocate", counted):
        yield found


def nbytes(unit: Unit) -> int:
    return sum(buffer.nbytes for group in unit.groups for buffer in group.weights)


def trainer_of(strategy: str | None, **options: Any) -> TopologyTrainer:
    case = case_for(TOPOLOGY, num_layers=4, adam_eps=1e-3)
    return build_topology_trainer(TOPOLOGY, case, strategy, **options)


def peaks(rank: int, world: int) -> dict[str, int]:
    """Most bytes of gathered weights in a step after the first, by how units are chosen."""
    init_topology(TOPOLOGY)
    found = {}
    for name, options in (
        ("layers", {}), ("parts", {"ddp": PARTS}), ("classes", {"fsdp_unit_modules": CLASSES}),
        ("recomputed parts", {"ddp": PARTS, "fields": RECOMPUTED}),
    ):  # fmt: skip
        trainer = trainer_of(ZERO_3, **options)
        topology_step(trainer, 0)
        with gathered_bytes(trainer) as taken:
            topology_step(trainer, 1)
        found[name] = max(taken)
        units = trainer.chunks[0].engine.units
        sizes = {unit.name: nbytes(unit) for unit in units}
        experts = [size for unit, size in sizes.items() if ".experts" in unit]
        others = [size for unit, size in sizes.items() if ".experts" not in unit]
        found[f"{name}: allowed"] = (
            sizes["root"] + 2 * max(size for size in others if size != sizes["root"])
            + 2 * max(experts, default=0)
        )  # fmt: skip
    return found


def test_experts_are_gathered_one_after_the_other() -> None:
    """With the root, the layer around them, and what is gathered ahead."""
    for found in run_ranks(peaks, 2, timeout=200):
        for name in ("layers", "parts", "classes", "recomputed parts"):
            assert found[name] <= found[f"{name}: allowed"], found
        assert found["parts"] < found["layers"] / 3, found
        assert found["classes"] < found["layers"] / 2, found


class Layer(BaseMoELayer):
    """What the choice of units looks at, without core's construction."""

    def __init__(self, experts: nn.Module) -> None:
        nn.Module.__init__(self)
        self.router, self.experts = nn.Linear(2, 2), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Grouped(nn.Module):
    """As core's layer of Transformer Engine's grouped products; `fused`: their operations read the
    weights without calling the linear layers."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.linear_fc1, self.activation_func = nn.Linear(2, 2), nn.GELU()
        self.linear_fc2 = nn.Linear(2, 2)
        self.config = SimpleNamespace(use_transformer_engine_op_fuser=fused)


def test_grouped_experts_are_units_by_what_is_called() -> None:
    def names(fused: bool) -> list[str]:
        return list(chosen_units(nn.Sequential(Layer(Grouped(fused))), None, parts=True))

    assert names(False) == ["0.experts.linear_fc1", "0.experts.linear_fc2"]
    assert names(True) == ["0.experts"]
    assert not chosen_units(nn.Sequential(Layer(Grouped(False))), None)


def train_like_ddp(rank: int, world: int, rows: list[dict[str, Any]]) -> int:
    init_topology(TOPOLOGY)
    for row in rows:
        strategy, options = row["strategy"], {k: v for k, v in row.items() if k != "strategy"}
        change = {name: options[name] for name in ("change",) if name in options}
        reference, ours = trainer_of(None, **change), trainer_of(strategy, **options)
        for step in range(STEPS):
            expected, mine = topology_step(reference, step), topology_step(ours, step)
            label = f"{row}, step {step}, rank {rank}"
            if step == 0:
                check_step(mine, expected, label)
            check_loss(mine.loss, expected.loss, label)
            check_norm(mine.norm, expected.norm, label, FREE)
            check_weights(mine.weights, expected.weights, label)
    return len(rows)


def test_parts_of_layers_train_like_ddp() -> None:
    """Experts without tokens, recompute and fixed slots too."""
    rows = [
        {"strategy": ZERO_3, "ddp": PARTS},
        {"strategy": "optim_grads", "ddp": PARTS, "change": feed_two_experts},
        {"strategy": ZERO_3, "ddp": SLOTS, "change": feed_two_experts},
        {"strategy": ZERO_3, "ddp": PARTS, "fields": RECOMPUTED},
        {"strategy": ZERO_3, "ddp": SLOTS, "fields": RECOMPUTED},
        {"strategy": ZERO_3, "fsdp_unit_modules": CLASSES},
    ]
    assert run_ranks(train_like_ddp, 2, rows, timeout=250) == [len(rows)] * 2


@pytest.mark.full
def test_parts_of_layers_train_like_ddp_under_every_strategy() -> None:
    rows = [
        {"strategy": strategy, "ddp": ddp, "fields": fields}
        for strategy in STRATEGIES for ddp in (PARTS, SLOTS) for fields in ({}, RECOMPUTED)
    ]  # fmt: skip
    assert run_ranks(train_like_ddp, 3, rows, timeout=900) == [len(rows)] * 3


def saved_and_loaded(rank: int, world: int, root: str) -> None:
    """Weights of one choice of units, in another, bit for bit."""
    init_topology(TOPOLOGY)
    saver, loader = trainer_of(ZERO_3, ddp=PARTS), trainer_of(ZERO_3)
    for step in range(2):
        topology_step(saver, step)
    [source], [target] = saver.chunks, loader.chunks
    save_checkpoint(root, 1, {"model": source.state_dict_for_save_checkpoint()})
    load_checkpoint(root, {"model": target.state_dict_for_save_checkpoint()})
    target.engine.main_weights_changed(loaded=True)
    expected, found = saver.weights(), loader.weights()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_does_not_say_how_units_were_chosen(tmp_path: Path) -> None:
    run_ranks(saved_and_loaded, 2, str(tmp_path), timeout=200)


def refused(rank: int, world: int) -> str:
    init_topology(TOPOLOGY)
    case = case_for(TOPOLOGY, bias=True)
    with pytest.raises(ValueError) as caught:
        build_topology_trainer(TOPOLOGY, case, ZERO_3, ddp=PARTS)
    return str(caught.value)


def test_experts_that_return_their_biases_are_refused() -> None:
    assert "with add_bias_linear=True" in run_ranks(refused, 1)[0]
