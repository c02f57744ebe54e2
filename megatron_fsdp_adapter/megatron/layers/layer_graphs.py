"""CUDA graphs of layers: what core's options (`cuda_graph_impl="local"`) ask to be captured.

Core captures a layer at the end of the first step, without running its hooks, and replays the graph
in place of the call that runs them. Here hooks gather the weights, which are gone at the end of a
step. So core's managers are removed from the layers, and the layers' forwards, which run inside of
the hooks, are captured instead (`graphs/layer_graphs.py`). The options stay core's.

Rejected: to give core stable addresses and run hooks around its runners. Its first replay of every
layer follows a capture that no hook surrounds, and releases call a layer in three different ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import GraphableMegatronModule
from torch import nn

from ...core.engine.engine import FsdpEngine
from ...graphs.capture import CudaGraphs
from ...graphs.layer_graphs import LayerGraphs
from ..options.cuda_graphs import captures_layers, modules_asked_for
from .te_captures import check_tracker, telling_te

_MANAGER = "cudagraph_manager"
_PARTS = {"attn": "self_attention", "mlp": "mlp", "mamba": "mixer"}
"""Core's name of a part of layers -> the layer's attribute that holds the part."""


def layer_graphs(
    engine: FsdpEngine, module: nn.Module, config: Any, graphs: CudaGraphs | None = None
) -> LayerGraphs | None:
    """The graphs of one wrapper's layers; None if its options ask for none. graphs: captures and
    replays; by default CUDA graphs of the device."""
    if not captures_layers(config):
        return None
    take_off_managers(module)
    check_tracker(module)
    dispatchers = [
        one.token_dispatcher for one in module.modules() if hasattr(one, "token_dispatcher")
    ]
    return LayerGraphs(
        engine,
        graphs or CudaGraphs(engine.runtime.device, _generators, telling_te),
        list(captured_modules(module, modules_asked_for(config))),
        int(getattr(config, "cuda_graph_warmup_steps", 3)),
        _shared_buffers,
        partial(forget_last_call, dispatchers),
    )


def _shared_buffers() -> Iterable[torch.Tensor]:
    """Core's buffers into which tensor-parallel ranks gather sequences. Graphs hold their
    addresses, but core replaces a buffer when a longer sequence comes."""
    return get_global_memory_buffer().buffer.values()


def forget_last_call(dispatchers: Iterable[Any]) -> None:
    """Detaches the tensors that core's token dispatchers keep of their last call.

    Otherwise these keep the autograd graph of all layers below, with the nodes that add gradients
    to weights. Autograd would use those nodes again in a capture, and make it wait for the stream
    on which they were made. CUDA refuses that."""
    for dispatcher in dispatchers:
        for name, value in vars(dispatcher).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, value.detach())


def captured_modules(module: nn.Module, asked: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules to capture, with their names.

    asked: core's names of parts of layers; empty for whole layers. A layer with experts is never
    captured as a whole, because the dispatch of tokens reads their numbers on the host: then only
    its attention is captured."""
    parts = set(asked)
    for name, layer in module.named_modules():
        # Layers contain no other graphable module. Blocks and models do: they are graphable too,
        # for inference.
        if not _is_graphable(layer) or sum(map(_is_graphable, layer.modules())) != 1:
            continue
        # Core's layers of experts hold a router.
        has_experts = any(hasattr(child, "router") for child in layer.modules())
        if not parts and not has_experts:
            yield name, layer
            continue
        for part in sorted(_parts_of(layer, parts or {"attn"}, has_experts)):
            yield f"{name}.{part}", getattr(layer, part)


def _is_graphable(module: nn.Module) -> bool:
    return isinstance(module, GraphableMegatronModule)


def _parts_of(layer: nn.Module, asked: set[str], has_experts: bool) -> Iterator[str]:
    """Attributes of the layer's parts that are asked for, can be captured and have parameters."""
    for option, part in _PARTS.items():
        found = getattr(layer, part, None)
        if option not in asked or found is None or (part == "mlp" and has_experts):
            continue
        if any(True for _ in found.parameters()):  # not an IdentityOp
            yield part


def take_off_managers(module: nn.Module) -> None:
    """Removes core's own graphs from the layers. Core looks for this attribute in every call, and
    without it calls the layer itself."""
    for layer in list(module.modules()):
        if _is_graphable(layer) and hasattr(layer, _MANAGER):
            delattr(layer, _MANAGER)


def _generators() -> list[torch.Generator]:
    """The generators of tensor-parallel ranks. RuntimeError if core keeps copies of generators'
    states instead, which a capture cannot switch between."""
    states = get_cuda_rng_tracker().get_states()
    copies = sorted(name for name, one in states.items() if not isinstance(one, torch.Generator))
    if copies:
        raise RuntimeError(
            f"CUDA graphs of layers cannot draw from the random states {', '.join(copies)}, which "
            "are copied in and out. Set use_te_rng_tracker=True (--te-rng-tracker), or, without "
            "Transformer Engine, use_cudagraphable_rng=True where model_parallel_cuda_manual_seed "
            "is called"
        )
    return list(states.values())
