"""Weights that operations read in the place of the layers that hold them, as core's fused MLPs have
Transformer Engine's: made in the first forward out of the parameters that are there then, kept
where no module tree sees them, asked for `main_grad` in their backward.

The operation here is a stand-in, checked against `TEGroupedMLP` of core 0.19.2; `wgrad_probe` tries
the real one out where it can run (`tests/gpu/test_gpu_experts.py`)."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import nn

from megatron_fsdp_adapter import FullyShardedDataParallel
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.megatron import fused_wgrad, units, wgrad_probe
from megatron_fsdp_adapter.megatron.wgrad_probe import (
    UNKNOWN,
    Observed,
    Precision,
    observed,
    read_by_operations,
)
from tests.distributed.gpt import STRATEGIES, Case, ddp_config, init_megatron, model_config
from tests.distributed.shared_ranks import on_ranks

CASE = Case()
WIDTH, INNER, GROUPS = 12, 20, 3
SEEN = {
    WgradProtocol.OVERWRITES: Observed(adds=True, overwrites_in_backward=True),
    WgradProtocol.OVERWRITES_ALWAYS: Observed(adds=True, overwrites_in_forward=True),
    WgradProtocol.ACCUMULATES: Observed(adds=True),
}
ENSURES = getattr(TEGroupedMLP, "_ensure_main_grad", None)
"""From 0.18 on core looks at `main_grad` before each forward, and sets a flag."""


class Products(torch.autograd.Function):
    """Of each group's rows with its weight. Its gradients go where the first weight says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: Any) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        return torch.cat([a @ w.t() for a, w in zip(x.chunk(GROUPS), weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        found = [g.t() @ a for g, a in zip(grad.chunk(GROUPS), x.chunk(GROUPS), strict=True)]
        given = torch.cat([g @ w for g, w in zip(grad.chunk(GROUPS), weights, strict=True)])
        mains = [
            w.get_main_grad() if hasattr(w, "__fsdp_param__") else w.main_grad for w in weights
        ]
        overwrites = getattr(weights[0], "overwrite_main_grad", False)
        for main, one in zip(mains, found, strict=True):
            main.copy_(one) if overwrites else main.add_(one)
        return (given, *[None] * GROUPS)


class Grouped(nn.Module):
    """Holds the weights; called only where nothing is fused."""

    def __init__(self, inputs: int, outputs: int, fused: bool) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fused
        for number in range(GROUPS):
            weight = nn.Parameter(torch.randn(outputs, inputs) * 0.3)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [getattr(self, f"weight{number}") for number in range(GROUPS)]
        return torch.cat([a @ w.t() for a, w in zip(x.chunk(GROUPS), weights, strict=True)])


class Operations(nn.Module):
    """Has the parameters of two layers under names of its own."""

    def __init__(self, layers: list[Grouped]) -> None:
        super().__init__()
        for place, layer in enumerate(layers):
            for number in range(GROUPS):
                held = layer.get_parameter(f"weight{number}")
                self.register_parameter(f"of_{place}_{number}", held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place in range(2):
            weights = [getattr(self, f"of_{place}_{number}") for number in range(GROUPS)]
            x = Products.apply(torch.tanh(x), *weights)
        return x


class Layer(nn.Module):
    """As core's `TEGroupedMLP` with the fuser on, inside a layer with a weight of its own."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.linear_fc1 = Grouped(WIDTH, INNER, fused)
        self.linear_fc2 = Grouped(INNER, WIDTH, fused)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self._with_fused_impl = fused
        self._fused_ops: tuple[Operations] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [self.linear_fc1, self.linear_fc2]
        if not self._with_fused_impl:
            out = self.linear_fc2(torch.tanh(self.linear_fc1(torch.tanh(x))))
            return x + out * self.norm
        if self._fused_ops is None:
            self._fused_ops = (Operations(layers),)
        for layer in layers:
            if ENSURES is not None:
                ENSURES(layer)
        return x + self._fused_ops[0](x) * self.norm


def gradients(strategy: str, writer: WgradProtocol | None) -> list[dict[str, torch.Tensor]]:
    """Of this rank's rows in each of three steps of two microbatches, with an evaluation and a
    change of the weights between. writer: None for autograd."""
    config = model_config(CASE)
    config.gradient_accumulation_fusion = writer is not None
    torch.manual_seed(5)
    model = nn.Sequential(*(Layer(writer is not None) for _ in range(3)))
    answer = mock.patch.object(units, "observed", lambda *args, **options: SEEN[writer])  # type: ignore[index]
    with answer:
        wrapper = FullyShardedDataParallel(config, ddp_config(CASE, strategy), model, [Layer])
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    found = []
    for _ in range(3):
        wrapper.zero_grad_buffer()
        for number in range(2):
            x = torch.randn(4 * GROUPS, WIDTH, generator=generator)
            wrapper.engine.is_last_microbatch = number == 1
            wrapper(x.requires_grad_()).square().mean().backward()
        wrapper.finish_grad_sync()
        pairs = wrapper.engine.pairs
        found.append({
            pair.managed.fqns[0]: pair.sharded.grad._local_tensor.clone() for pair in pairs
        })  # fmt: skip
        with torch.no_grad():
            for pair in pairs:
                pair.sharded._local_tensor.sub_(pair.sharded.grad._local_tensor)
        wrapper.start_param_sync()
        with torch.no_grad():
            wrapper(torch.randn(GROUPS, WIDTH, generator=generator))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_of_operations_are_those_of_autograd_in_every_protocol(strategy: str) -> None:
    init_megatron()
    expected = gradients(strategy, None)
    for writer in SEEN:
        for step, (mine, theirs) in enumerate(
            zip(gradients(strategy, writer), expected, strict=True)
        ):
            assert mine.keys() == theirs.keys() and theirs
            for name, value in theirs.items():
                label = f"{writer.value}, step {step}, {name}: "
                torch.testing.assert_close(
                    mine[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, at=label: at + m
                )


def test_an_operation_is_tried_out_beside_the_layer_whose_weights_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What holds for both: here the operation reads no flag before its forward."""
    asked: list[str] = []

    def seen(name: str, *unused: Any) -> Observed:
        asked.append(name)
        return Observed(
            adds=True, overwrites_in_forward=".ops." not in name, overwrites_in_backward=True
        )

    monkeypatch.setattr(wgrad_probe, "observed_once", seen)
    monkeypatch.setattr(wgrad_probe, "maker_name", lambda kind: "transformer_engine.GroupedLinear")
    layer = Layer(fused=True)
    looks = functools.partial(
        observed, layer.linear_fc1, torch.float32, precisions=(Precision("weights"),),
        main_dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    both = Observed(adds=True, overwrites_in_backward=True)
    assert looks(by_operations=read_by_operations(nn.Sequential(layer))) == both
    assert asked == ["transformer_engine.GroupedLinear", "transformer_engine.ops.GroupedLinear"]
    assert looks(by_operations=read_by_operations(Layer(fused=False))).overwrites_in_forward
    assert UNKNOWN.adds and fused_wgrad.fuses(layer.linear_fc1)
