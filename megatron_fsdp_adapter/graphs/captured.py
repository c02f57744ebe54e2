"""One call of a module, captured: a graph of its forward and one of its backward.

    eager, around it     gather(weights), wait | hooks on inputs, outputs | reduce(bucket)
    in the graphs        the module's kernels, and the move of its weight gradients into the bucket

Weights and buckets lie in slots, so that a replay finds them where the capture did. Each graph is
captured where its pass comes to it for the first time, in the middle of a training step, and then
replayed: nothing is warmed up on made-up data or written that an eager step does not write, and
autograd, fused weight gradients and quantizers are what they are in that step.

What a graph reads of others is copied into memory of its own; or is read where it is, if the call
in front of it in the same pass has left it there. Inputs, outputs and gradients are known by
aliases: a tensor held for good would keep its memory from later captures of the same pool, which is
the whole of a model's activations once more.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..core.engine.buffer import copy_each
from ..core.engine.group import ParamGroup
from ..core.engine.wgrad import FusedWgrad
from .capture import Graph, Graphs

_PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype)


class NotCapturable(TypeError):
    """A call has inputs or outputs that a graph cannot be given."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What a replay's input has in common with the capture's."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


def strip(value: Any, tensors: list[torch.Tensor], returned: bool = False) -> Any:
    """`value` with specs for tensors, which are appended to `tensors`; comparable and hashable.

    NotCapturable for what is neither a tensor, a plain value nor a tuple or dict of those. What is
    `returned` may be a parameter (a bias that is added outside): it stays, with its gradient.
    """
    if isinstance(value, nn.Parameter):
        if returned:
            return (nn.Parameter, value)
    elif isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorSpec(value.shape, value.stride(), value.dtype, value.requires_grad)
    elif isinstance(value, _PLAIN):
        return (type(value), value)
    elif type(value) is tuple:
        return (tuple, tuple([strip(item, tensors, returned) for item in value]))
    elif type(value) is dict:
        items = [(name, strip(item, tensors, returned)) for name, item in value.items()]
        return (dict, tuple(items))
    raise NotCapturable(f"it is given or returns a {type(value).__name__}")


def shapes(template: Any) -> str:
    """Of the tensors of a template, to be read."""
    if isinstance(template, TensorSpec):
        return "x".join(map(str, template.shape)) or "scalar"
    kind, value = template
    inside = value if kind is tuple else [item for _, item in value] if kind is dict else ()
    return ", ".join(filter(None, map(shapes, inside)))


def fill(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The reverse of `strip`."""
    if isinstance(template, TensorSpec):
        return next(tensors)
    kind, value = template
    if kind is tuple:
        return tuple(fill(item, tensors) for item in value)
    if kind is dict:
        return {name: fill(item, tensors) for name, item in value}
    return value


@dataclasses.dataclass(frozen=True)
class WrittenGrads:
    """Where the weight gradients of a captured backward go: parts of one group's bucket."""

    group: ParamGroup
    indices: tuple[int, ...]

    @property
    def direct(self) -> FusedWgrad:
        return self.group.direct

    def put(self) -> None:
        """Moves `.grad` into the bucket and drops it, as a unit's end does; inside of a capture."""
        added: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        copied: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index in self.indices:
            param = self.group.params[index]
            if param.grad is not None:
                views, grads = added if index in self.direct.written else copied
                views.append(self.group.collected.params[index])
                grads.append(param.grad)
                self.direct.note((index,))
            param.grad = None
        if added[0]:
            torch._foreach_add_(*added)
        copy_each(*copied)
        self.direct.settle()

    def present(self) -> frozenset[int]:
        """Those whose part of the bucket holds a gradient."""
        return frozenset(self.direct.written.intersection(self.indices))


@dataclasses.dataclass(frozen=True)
class Site:
    """A module that is captured. function: its forward; grads: where its weight gradients go;
    caches: tensors that it has beside parameters."""

    name: str
    function: Callable[..., Any]
    grads: tuple[WrittenGrads, ...]
    caches: Callable[[], Iterable[torch.Tensor]] = tuple

    def __hash__(self) -> int:
        return id(self)

    def check_open(self) -> None:
        if not all(one.direct.is_open for one in self.grads):
            raise RuntimeError(
                f"{self.name}: the backward of its graph runs outside of its unit's backward; call "
                "the model through its wrapper, and run backward on what it returned"
            )


class CapturedCall:
    """One call of `site`, of inputs like `template` says, in memory of `pool`.

    Attributes:
        needs_backward: whether an output needs a gradient.
    """

    def __init__(self, site: Site, template: Any, graphs: Graphs, pool: Any) -> None:
        self.site, self.template, self._graphs, self._pool = site, template, graphs, pool
        self.needs_backward = False
        self._inner: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        self._backward: Graph | None = None

    # Forward.

    def record(
        self, tensors: Sequence[torch.Tensor], is_ours: Callable[[torch.Tensor], bool]
    ) -> list[torch.Tensor]:
        """Captures the forward and runs it; returns its outputs. is_ours: whether a tensor is where
        a graph of this pass has left it."""
        reads = [is_ours(tensor) for tensor in tensors]

        def forward() -> Any:
            placed = [
                tensor if read else torch.empty_like(tensor)
                for tensor, read in zip(tensors, reads, strict=True)
            ]
            inner = [
                place.detach().requires_grad_(tensor.requires_grad)
                for place, tensor in zip(placed, tensors, strict=True)
            ]
            args, kwargs = fill(self.template, iter(inner))
            with torch.enable_grad():
                output = self.site.function(*args, **kwargs)
            outputs: list[torch.Tensor] = []
            return placed, inner, outputs, strip(output, outputs, returned=True)

        self._forward, result = self._graphs.capture(forward, self._pool)
        placed, inner, outputs, self._output = result
        alias = self._graphs.alias
        both = list(zip(placed, reads, strict=True))
        self._addresses = [place.data_ptr() if read else None for place, read in both]
        self._own = [None if read else alias(place) for place, read in both]
        self._outputs = [alias(output) for output in outputs]
        self.needs = [output.requires_grad for output in outputs]
        self.needs_backward = any(self.needs)
        self._inner = (inner, outputs) if self.needs_backward else None
        self._run_forward(tensors)
        return [output.detach() for output in outputs]

    def accepts(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether what the graph reads where others left it is there."""
        return all(
            address is None or tensor.data_ptr() == address
            for address, tensor in zip(self._addresses, tensors, strict=True)
        )

    def replay(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the forward on new inputs."""
        self._run_forward(tensors)
        return [output.detach() for output in self._outputs]

    def _run_forward(self, tensors: Sequence[torch.Tensor]) -> None:
        for own, tensor in zip(self._own, tensors, strict=True):
            if own is not None:
                own.copy_(tensor)
        self._forward.replay()

    def output(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the module would return."""
        return fill(self._output, iter(tensors))

    # Backward.

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the inputs; those of weights are in the bucket. The first one is
        captured.

        Of inputs that come from elsewhere they are copies: a pipeline may still be sending them
        to the stage before when the next pass in this pool overwrites the graph's.
        """
        self.site.check_open()
        if self._inner is not None:
            return self._record_backward(grads)
        if [grad is not None for grad in grads] != self._given:
            raise RuntimeError(
                f"{self.site.name}: other outputs get gradients than when its backward was "
                "captured; switch its CUDA graph off"
            )
        for one, before, after in zip(self.site.grads, self._before, self._after, strict=True):
            if one.present() != before:
                raise RuntimeError(
                    f"{self.site.name}: its bucket holds other gradients than when its backward "
                    "was captured; a replay would corrupt them. Switch its CUDA "
                    "graph off"
                )
            one.direct.note(after)
        self._run_backward(grads)
        return self._handed_out(self._input_grads)

    def _handed_out(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [
            None if grad is None else grad.detach() if own is None else grad.clone()
            for grad, own in zip(found, self._own, strict=True)
        ]

    def _record_backward(
        self, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        assert self._inner is not None
        (inner, outputs), self._inner = self._inner, None
        self._given = [grad is not None for grad in grads]
        self._before = [one.present() for one in self.site.grads]

        def backward() -> Any:
            placed = [None if grad is None else torch.empty_like(grad) for grad in grads]
            reached = [
                (output, place)
                for output, place in zip(outputs, placed, strict=True)
                if place is not None and output.requires_grad
            ]
            earlier = self._set_aside()
            # Not `autograd.grad`, in which parts that are recomputed (checkpoints) refuse to run.
            torch.autograd.backward([one for one, _ in reached], [place for _, place in reached])
            for one in self.site.grads:
                one.put()
            for param, grad in earlier:
                param.grad = grad
            return placed, [tensor.grad for tensor in inner]

        self._backward, (placed, found) = self._graphs.capture(backward, self._pool)
        alias = self._graphs.alias
        self._own_grads = [None if place is None else alias(place) for place in placed]
        self._input_grads = [None if grad is None else alias(grad) for grad in found]
        self._after = [one.present() for one in self.site.grads]
        self._run_backward(grads)
        return self._handed_out(found)

    def _set_aside(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients that eager calls of the module have left, which are no part of this graph."""
        params = [one.group.params[index] for one in self.site.grads for index in one.indices]
        found = [(param, param.grad) for param in params if param.grad is not None]
        for param, _ in found:
            param.grad = None
        return found

    def _run_backward(self, grads: Sequence[torch.Tensor | None]) -> None:
        for own, grad in zip(self._own_grads, grads, strict=True):
            if own is not None and grad is not None:
                own.copy_(grad)
        assert self._backward is not None
        self._backward.replay()
