"""CUDA graphs of layers: what core's options (`cuda_graph_impl="local"`) ask to be captured.

Core captures a layer at the end of the first step, from outside of its hooks, and replays it in
place of the call that they hang on. Here weights are gone at the end of a step, and hooks gather
them. So core's managers are taken off the layers, and the layers' forwards, which run inside of the
hooks, are captured instead (`core/engine/layer_graphs.py`); the options stay core's. Handing core
stable addresses, and running hooks around its runners, was turned down: its first replay of every
layer follows a capture that no hook surrounds, and it has three ways to call a layer, by release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import GraphableMegatronModule
from torch import nn

from ..core.engine.engine import FsdpEngine
from ..core.engine.layer_graphs import LayerGraphs
from ..core.runtime.graphs import CudaGraphs, Graphs
from .options.cuda_graphs import captures_layers, modules_asked_for

_MANAGER = "cudagraph_manager"


class LayerCaptures:
    """The graphs of one wrapper's layers, if its options ask for any; else every call does nothing.

    Args:
        graphs: what captures; by default the device's CUDA graphs.
    """

    def __init__(
        self, engine: FsdpEngine, module: nn.Module, config: Any, graphs: Graphs | None = None
    ) -> None:
        self.graphs: LayerGraphs | None = None
        self.captured: list[str] = []
        if captures_layers(config):
            take_off_managers(module)
            chosen = list(captured_modules(module, modules_asked_for(config)))
            self.captured = sorted({type(one).__name__ for _, one in chosen})
            capturing = graphs or CudaGraphs(engine.runtime.device, _generators)
            self.graphs = LayerGraphs(
                engine, capturing, int(getattr(config, "cuda_graph_warmup_steps", 3))
            )
            self.graphs.install(chosen)

    def forward_pass(self, training: bool) -> AbstractContextManager[None]:
        """Around a forward of the model, in training mode or not."""
        return nullcontext() if self.graphs is None else self.graphs.forward_pass(training)

    def gradients_finished(self) -> None:
        if self.graphs is not None:
            self.graphs.step_done()

    def gradients_forgotten(self) -> None:
        if self.graphs is not None:
            self.graphs.reset()


def captured_modules(
    module: nn.Module, asked: Iterable[str]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules to capture, with their names. `asked`: core's names of parts of layers; none for
    whole layers, of which those with experts, whose dispatch reads numbers of tokens on the host,
    are captured up to their attention."""
    parts = set(asked)
    for name, layer in module.named_modules():
        # Blocks and whole models are graphable too, for inference.
        if not _is_graphable(layer) or sum(map(_is_graphable, layer.modules())) > 1:
            continue
        has_experts = _has_experts(layer)
        if not parts and not has_experts:
            yield name, layer
            continue
        for part in sorted(_parts_of(layer, parts or {"attn"}, has_experts)):
            yield f"{name}.{part}", getattr(layer, part)


def _is_graphable(module: nn.Module) -> bool:
    return isinstance(module, GraphableMegatronModule)


def _parts_of(layer: nn.Module, asked: set[str], has_experts: bool) -> Iterator[str]:
    wanted = {"attn": "self_attention", "mlp": "mlp", "mamba": "mixer"}
    for option, part in wanted.items():
        found = getattr(layer, part, None)
        if option not in asked or found is None or (part == "mlp" and has_experts):
            continue
        if any(True for _ in found.parameters()):
            yield part


def _has_experts(layer: nn.Module) -> bool:
    """Whether tokens are dispatched in it: core's layers of experts hold a router."""
    return any(hasattr(child, "router") for child in layer.modules())


def take_off_managers(module: nn.Module) -> None:
    """Takes core's own graphs off the layers: core looks for the attribute in every call."""
    for layer in list(module.modules()):
        if _is_graphable(layer) and hasattr(layer, _MANAGER):
            delattr(layer, _MANAGER)


def _generators() -> list[torch.Generator]:
    """Those of tensor-parallel ranks, where they are in a state that graphs can use."""
    states = get_cuda_rng_tracker().get_states().values()
    return [state for state in states if isinstance(state, torch.Generator)]
