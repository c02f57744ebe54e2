"""Core's schedule that overlaps the communication of experts (`overlap_moe_expert_parallel_comm`).

This schedule does not call the model. The model makes a plan of a microbatch
(`build_schedule_plan`). A plan consists of *nodes*: parts of layers with a forward, a backward and,
with `delay_wgrad_compute`, a backward of weights. Core runs the nodes of two microbatches in turn,
some of them on a second stream, that of communication. Here each node of a plan is wrapped: the
engine is notified before a node reads a layer's weights, and after the layer's last node. Core is
not changed; the model's method is replaced on the instance.

A layer is one stage. Where its experts are separate units it is two: the experts are gathered only
for the node that reads them, while the rest of the layer stays gathered.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...core.engine.engine import FsdpEngine
from ...core.engine.prefetch_order import BACKWARD, FORWARD
from ...core.engine.scheduled_pass import ScheduledPass
from ...core.engine.unit import Unit
from ..options.rules import is_on
from ..options.table import DELAY
from ..options.table import PARTS_OF_LAYERS as OPTION

BUILD = "build_schedule_plan"
FIRST = ("pre_dispatch_computation", "attn")
"""Names of the node with which a layer's forward begins and its backward ends; one is there."""
EXPERTS = "mlp"
COMBINE = "moe_combine"
PREDICTION = "mtp_post_process"
NODES = (*FIRST, "moe_dispatch", EXPERTS, COMBINE, PREDICTION)
ROUTED = "experts"
"""The module whose weights the node `EXPERTS` reads; it reads no others."""
COMBINED_BY = "fc2_latent_proj"
"""A module of experts that runs in the node `COMBINE`, on the stream of communication."""


class _Node:
    """Wraps a node of a plan: tells the passes when it runs.

    part: the number of the node's stage within its layer. Keywords are explained at the attributes.
    """

    def __init__(
        self,
        node: Any,
        passes: _Passes,
        layer: int,
        part: int = 0,
        *,
        ends_forward: bool = False,
        ends_backward: bool = False,
        delays: bool = False,
        behind: Any = None,
    ) -> None:
        self._node = node
        self._passes = passes
        # The first stage of its layer, and the node's own stage, in the order of forwards.
        self._layer_begins = sum(map(len, passes.layers[:layer]))
        self._stage = self._layer_begins + part
        # The node's stage in the order of backwards. In both orders `part` counts from the layer's
        # first stage: it is entered first and left last.
        self._backward_stage = sum(map(len, passes.layers[layer + 1 :])) + part
        # True if the node is the last of its stage that reads weights; and that makes gradients.
        self._ends_forward = ends_forward
        self._ends_backward = ends_backward
        self._delays = delays  # `backward_dw` makes the gradients of weights
        # A node on the stream that waits for weights; None if this node is on that stream itself.
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def forward(self, *inputs: Any) -> Any:
        self._passes.catch_up(self._layer_begins, self._node)
        with self._passes.forward.part_of(self._stage):
            output = self._node.forward(*inputs)
        if self._ends_forward:
            self._passes.forward.leave(self._stage)
        return output

    def backward(self, *grads: Any) -> Any:
        passes = self._passes
        passes.catch_up(passes.stages, self._node)
        with passes.backward.part_of(self._backward_stage):
            if self._behind is not None:
                # The stream of communication waits for the plan's event, which was recorded before
                # the weights were gathered. So it is recorded again.
                self._node.event.record(_stream(self._behind))
            found = self._node.backward(*grads)
        self._after(done=not self._delays)
        return found

    def backward_dw(self) -> Any:
        if not self._delays:
            return self._node.backward_dw()
        with self._passes.backward.part_of(self._backward_stage):
            found = self._node.backward_dw()
        self._after(done=True)
        return found

    def _after(self, done: bool) -> None:
        if self._ends_backward and done:
            self._passes.backward.leave(self._backward_stage)


class _Passes:
    """Forward and backward of one plan.

    layers: the stages of each layer. In both directions the first one is entered first and left
    last. throughout: units that any node may read. foreign: see `_streams_follow`."""

    def __init__(
        self,
        engine: FsdpEngine,
        layers: Sequence[Sequence[Sequence[Unit]]],
        throughout: Sequence[Unit],
        foreign: Iterable[int],
    ) -> None:
        self.layers = layers  # the stages of each
        self.stages = sum(map(len, layers))  # their number
        self._foreign = frozenset(foreign)  # ids of parameters, see `_streams_follow`
        onward = [stage for layer in layers for stage in layer]
        back = [stage for layer in reversed(layers) for stage in layer]
        self.forward = ScheduledPass(engine, onward, throughout, FORWARD)
        self.backward = ScheduledPass(engine, back, throughout, BACKWARD, self._streams_follow)

    def catch_up(self, stage: int, node: Any) -> None:
        """Leaves the forward's stages before `stage` that are not left yet. Their last reader may
        have run on the other stream: so this node's stream waits first."""
        behind = [number for number in range(stage) if self.forward.is_in(number)]
        if behind:
            node.event.wait(_stream(node))
        for number in behind:
            self.forward.leave(number)

    def _streams_follow(self, units: Sequence[Unit]) -> None:
        """Keeps the memory of `foreign` parameters' gradients until the current stream is done with
        them. They were made on the stream of communication, and this one takes them away."""
        for unit in units:
            for group in unit.trainable_groups:
                for param in group.params:
                    grad = param.grad
                    if id(param) in self._foreign and grad is not None and grad.is_cuda:
                        grad.record_stream(torch.cuda.current_stream())


def _stream(node: Any) -> Any:
    return node.stream() if callable(node.stream) else node.stream


def watch_plans(
    module: nn.Module, engine: FsdpEngine, before: Callable[[], Callable[[], None] | None]
) -> None:
    """Watches all plans that the model inside `module` makes. ValueError if the model makes none.

    before: a weak reference to a function; it is called before each plan is made. `engine` and the
    model are also held weakly, because the replaced method is an attribute of the model."""
    model = next((child for child in module.modules() if hasattr(child, BUILD)), None)
    if model is None:
        raise ValueError(
            f"{OPTION}=True: no module of the model has {BUILD}, which core needs to run parts of "
            "layers. Set it to False"
        )
    build = getattr(type(model), BUILD)
    engine_of = weakref.ref(engine)
    model_of = weakref.ref(model)

    def watched(*args: Any, **kwargs: Any) -> Any:
        engine = engine_of()
        model = model_of()
        call = before()
        # The caller has the model and the wrapper.
        assert engine is not None and model is not None and call is not None
        call()
        plan = build(model, *args, **kwargs)
        _watch(plan, model, engine)
        return plan

    setattr(model, BUILD, watched)


def _watch(plan: Any, model: Any, engine: FsdpEngine) -> None:
    """Wraps the nodes of a plan. Units that only one stage reads belong to it; the others stay
    gathered over the whole pass."""
    engine.to_unsharded()
    unit_of = {
        id(param): unit for unit in engine.units for group in unit.groups for param in group.params
    }

    def units(module: nn.Module | None) -> list[Unit]:
        if module is None:
            return []
        found = [unit_of[id(param)] for param in module.parameters()]
        return list({unit.ordinal: unit for unit in found}.values())

    layers = [plan.get_layer(number) for number in range(plan.num_layers())]
    embedding = units(getattr(model, "embedding", None))
    output = units(getattr(model, "output_layer", None))
    read = [[embedding], *(_stages(layer.layer, units) for layer in layers)]
    if plan.post_process is not None:
        read.append([output])
    readers = Counter(unit.ordinal for layer in read for stage in layer for unit in stage)
    once = {ordinal for ordinal, count in readers.items() if count == 1}
    once.discard(engine.root.ordinal)
    if any(hasattr(getattr(layer, PREDICTION, None), "stream") for layer in layers):
        # A layer that predicts further tokens (MTP) calls embedding and output layer too.
        once -= {unit.ordinal for unit in (*embedding, *output)}
    stages = [
        [[unit for unit in stage if unit.ordinal in once] for stage in layer] for layer in read
    ]
    throughout = [unit for unit in engine.units if unit.ordinal not in once]
    combining = [_combining(layer.layer) for layer in layers]
    norm = getattr(model.decoder, "final_layernorm", None)
    apart = [module for module in (norm, *combining) if module is not None]
    foreign = [id(param) for module in apart for param in module.parameters()]
    passes = _Passes(engine, stages, throughout, foreign)
    plan.pre_process = _Node(plan.pre_process, passes, 0, ends_forward=True, ends_backward=True)
    for number, layer in enumerate(layers, 1):
        reads_to_combine = combining[number - 1] is not None
        _watch_layer(layer, passes, number, reads_to_combine, len(stages[number]) > 1)
    if plan.post_process is not None:
        plan.post_process = _Node(
            plan.post_process, passes, len(stages) - 1, ends_forward=True, ends_backward=True
        )


def _combining(layer: nn.Module) -> nn.Module | None:
    """The layer's module that the node `COMBINE` runs; None if it has none."""
    for name, child in layer.named_modules():
        if name.endswith(COMBINED_BY):
            return child
    return None


def _stages(layer: nn.Module, units: Callable[[nn.Module], list[Unit]]) -> list[list[Unit]]:
    """The stages of a layer: its units, and in a second stage the units that contain only routed
    experts, if there are any."""
    routed: set[int] = set()
    for name, child in layer.named_modules():
        if name.rsplit(".", 1)[-1] == ROUTED:
            routed.update(map(id, child.parameters()))
    others = []
    experts = []
    for unit in units(layer):
        if all(id(param) in routed for group in unit.groups for param in group.params):
            experts.append(unit)
        else:
            others.append(unit)
    return [others, experts] if experts else [others]


def _watch_layer(
    layer: Any, passes: _Passes, number: int, reads_to_combine: bool, has_parts: bool
) -> None:
    """Wraps the nodes of a plan's layer. has_parts: its experts are a stage of their own."""
    nodes = {name: getattr(layer, name, None) for name in NODES}
    real = {name: node for name, node in nodes.items() if hasattr(node, "stream")}
    first = next(name for name in FIRST if name in real)
    last = next(name for name in (PREDICTION, COMBINE, EXPERTS) if name in real)
    delays = is_on(layer.config, DELAY)
    # The node `COMBINE` reads on the stream of communication, and may still run when its call has
    # returned: `catch_up` leaves the stage later.
    leaves_late = reads_to_combine and last == COMBINE
    for name, node in real.items():
        is_part = has_parts and name == EXPERTS
        is_last = name == last and not leaves_late
        watched = _Node(
            node,
            passes,
            number,
            part=1 if is_part else 0,
            ends_forward=is_part or is_last,
            ends_backward=is_part or name == first,
            delays=delays and name in (first, EXPERTS),
            behind=real[first] if name == COMBINE else None,
        )
        setattr(layer, name, watched)
