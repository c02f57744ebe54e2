"""Captured layers with quantized weights, on the host, train like layers that are not captured, bit
for bit, also where Transformer Engine's fields are padded copies of gathered scales."""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from megatron_fsdp_adapter.graphs.layer_graphs import LayerGraphs
from megatron_fsdp_adapter.quantized.params import PADDED
from tests.lib.engine.engine_cases import Rig, build
from tests.lib.engine.fake_graphs import FakeGraphs
from tests.lib.engine.pretended import pretended_world
from tests.lib.engine.small_model import Setup
from tests.lib.gpt.checks import check_same_bits

CHECKS = ("graphs/layer_graphs.py", "graphs/sites.py", "quantized/params.py")

STEPS = 5


def captured(rig: Rig) -> LayerGraphs:
    layers = [(layer.label, layer) for layer in rig.model.layers]
    return LayerGraphs(rig.engine, FakeGraphs(), layers, 1)  # type: ignore[arg-type]


def train(rig: Rig, graphs: LayerGraphs | None, microbatches: int) -> list[float]:
    """Losses of all microbatches. Weights are halved once, so that all scales change."""
    losses = []
    for step in range(STEPS):
        rig.zero()
        for number in range(microbatches):
            rig.last(number == microbatches - 1)
            if graphs is None:
                loss = rig.loss(step)
            else:
                with graphs.forward_pass(True):
                    loss = rig.loss(step)
            loss.backward()
            losses.append(loss.item())
        rig.finish()
        if graphs is not None:
            graphs.step_done()
        rig.optimizer_step()
        if step == STEPS // 2:
            rig.load()
        rig.sync(wait=False)
    return losses


@pytest.mark.parametrize("microbatches", (1, 2))
@pytest.mark.parametrize(
    ("recipe", "strategy", "slots"),
    [
        ("mxfp8", "optim_grads_params", True),
        ("mxfp8", "optim", False),
        ("current", "optim_grads_params", True),
        ("block128", "optim", False),
    ],
)
def test_captured_layers_train_like_others(
    recipe: str, strategy: str, slots: bool, microbatches: int
) -> None:
    setup = Setup(strategy, recipe=recipe, slots=slots)
    numbers = []
    weights = []
    for is_captured in (False, True):
        with pretended_world(2):
            rig = build(setup, HostRuntime())
            graphs = captured(rig) if is_captured else None
            numbers.append(train(rig, graphs, microbatches))
            weights.append(rig.weights())
            if graphs is not None:
                assert graphs.replayed
                assert not graphs.ran_eagerly
    assert numbers[1] == numbers[0]
    assert numbers[0][0] != numbers[0][-1]
    check_same_bits(weights[1], weights[0], recipe)


def test_padded_scales_keep_their_address_while_layers_are_captured() -> None:
    with pretended_world(2):
        rig = build(Setup("optim", recipe="mxfp8"), HostRuntime())
        unit = next(unit for unit in rig.engine.units if unit.quantized)
        [param, *_] = unit.quantized
        rig.step()
        rig.engine.gather.unshard(unit)
        assert PADDED not in vars(param)
        unit.keep_weight_memory(unit.groups)
        unit.prepare()
        scales = param._rowwise_scale_inv
        assert scales.shape[0] % 128 == 0
        param._fsdp_planes["_rowwise_scale_inv"].add_(1)
        unit.prepare()
        rows, columns = param._fsdp_planes["_rowwise_scale_inv"].shape
        assert param._rowwise_scale_inv is scales
        assert torch.equal(scales[:rows, :columns], param._fsdp_planes["_rowwise_scale_inv"])
        unit.keep_weight_memory([])
        unit.prepare()
        assert param._rowwise_scale_inv is not scales
