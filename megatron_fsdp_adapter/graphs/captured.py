"""One call of a module, captured: a graph of its forward and one of its backward.

    eager, around it     gather(weights), wait | hooks on inputs, outputs | reduce(bucket)
    in the graphs        the module's kernels, and the move of its weight gradients into the bucket

Weights and buckets lie in slots, so that a replay finds them where the capture did. Each graph is
captured where its pass comes to it for the first time, in the middle of a training step, and then
replayed: nothing is warmed up on made-up data or written that an eager step does not write, and
autograd, fused weight gradients and quantizers are what they are in that step.

An input of a graph is copied into memory of the graph's own. It is read where it is if another
graph of the same pass has left it there. Inputs, outputs and gradients are known by aliases: a
tensor held for good would keep its memory from later captures of the same pool, so that a model's
activations would be there once more.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .capture import CudaGraphs
from .sites import Site

_PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype)


def strip(value: Any, tensors: list[torch.Tensor], returned: bool = False) -> Any:
    """A template of `value`, without its tensors, which are appended to `tensors`.

    The template is nested pairs of a type and what a replay's value has to have in common with the
    capture's. Templates can be compared. returned: `value` is what a module returned. It may have a
    parameter then (a bias that is added outside), which stays in the template.

    Raises:
        TypeError: something is neither a tensor, a plain value nor a tuple or dict of those.
    """
    if isinstance(value, nn.Parameter):
        if returned:
            return nn.Parameter, value
    elif isinstance(value, torch.Tensor):
        tensors.append(value)
        return torch.Tensor, (value.shape, value.stride(), value.dtype, value.requires_grad)
    elif isinstance(value, _PLAIN):
        return type(value), value
    elif type(value) is tuple:
        return tuple, tuple([strip(item, tensors, returned) for item in value])
    elif type(value) is dict:
        items = [(name, strip(item, tensors, returned)) for name, item in value.items()]
        return dict, tuple(items)
    raise TypeError(f"it takes or returns a {type(value).__name__}")


def fill(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The value that has this template and these tensors: the reverse of `strip`."""
    kind, value = template
    if kind is torch.Tensor:
        return next(tensors)
    if kind is tuple:
        return tuple(fill(item, tensors) for item in value)
    if kind is dict:
        return {name: fill(item, tensors) for name, item in value}
    return value


class CapturedCall:
    """One call of `site`, of inputs like `template`, in memory of `pool`."""

    def __init__(self, site: Site, template: Any, graphs: CudaGraphs, pool: Any) -> None:
        self.site = site
        self.template = template
        self._graphs = graphs
        self._pool = pool
        # Inputs and outputs of the captured forward, until its backward is captured.
        self._inner: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    # Forward.

    def record(
        self, tensors: Sequence[torch.Tensor], left_there: Container[int]
    ) -> list[torch.Tensor]:
        """Captures the forward and runs it; returns its outputs. left_there: addresses of tensors
        that graphs of this pass have returned."""
        # Of each input, whether the graph reads it where it is.
        self._read_there = [tensor.data_ptr() in left_there for tensor in tensors]

        def forward() -> Any:
            placed = []
            inner = []
            for tensor, there in zip(tensors, self._read_there, strict=True):
                place = tensor if there else torch.empty_like(tensor)
                placed.append(place)
                inner.append(place.detach().requires_grad_(tensor.requires_grad))
            args, kwargs = fill(self.template, iter(inner))
            with torch.enable_grad():
                output = self.site.function(*args, **kwargs)
            outputs: list[torch.Tensor] = []
            return placed, inner, outputs, strip(output, outputs, returned=True)

        # Replays the forward.
        self._forward, result = self._graphs.capture(forward, self._pool)
        # Template of what the module returned.
        placed, inner, outputs, self._output = result
        # Aliases: where the graph reads its inputs, and leaves its outputs.
        self._inputs = list(map(self._graphs.alias, placed))
        self._outputs = list(map(self._graphs.alias, outputs))
        # Of each output, whether it needs a gradient.
        self.needs = [output.requires_grad for output in outputs]
        self._inner = (inner, outputs) if any(self.needs) else None
        self._run_forward(tensors)
        return [output.detach() for output in outputs]

    def accepts(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if the inputs that the graph reads where they are lie at the captured addresses."""
        for there, place, tensor in zip(self._read_there, self._inputs, tensors, strict=True):
            if there and tensor.data_ptr() != place.data_ptr():
                return False
        return True

    def replay(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the forward on new inputs."""
        self._run_forward(tensors)
        return [output.detach() for output in self._outputs]

    def _run_forward(self, tensors: Sequence[torch.Tensor]) -> None:
        for there, place, tensor in zip(self._read_there, self._inputs, tensors, strict=True):
            if not there:
                place.copy_(tensor)
        self._forward()

    def output(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value that the module would return."""
        return fill(self._output, iter(tensors))

    # Backward.

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Runs the backward, and captures it the first time. Returns the gradients of the inputs;
        those of weights are in the bucket.

        Gradients of inputs that come from outside of the graphs are copies: a pipeline may still be
        sending them to the stage before when the next pass in this pool overwrites the graph's.
        """
        self.site.check_open()
        if self._inner is None:
            self._check_like_captured(grads)
            for (group, _), after in zip(self.site.parts, self._after, strict=True):
                group.grads.direct.note_written(after)
            found = self._input_grads
        else:
            found = self._record_backward(grads, *self._inner)
            self._inner = None
        for place, grad in zip(self._output_grads, grads, strict=True):
            if place is not None and grad is not None:
                place.copy_(grad)
        self._backward()
        given: list[torch.Tensor | None] = []
        for grad, there in zip(found, self._read_there, strict=True):
            if grad is not None:
                grad = grad.detach() if there else grad.clone()
            given.append(grad)
        return given

    def _check_like_captured(self, grads: Sequence[torch.Tensor | None]) -> None:
        given = [grad is not None for grad in grads]
        if given != [place is not None for place in self._output_grads]:
            raise RuntimeError(
                f"{self.site.name}: other outputs get gradients than when its backward was "
                "captured. Switch its CUDA graph off"
            )
        if self.site.written() != self._before:
            raise RuntimeError(
                f"{self.site.name}: its bucket holds other gradients than when its backward was "
                "captured, and a replay would corrupt them. Switch its CUDA graph off"
            )

    def _record_backward(
        self,
        grads: Sequence[torch.Tensor | None],
        inner: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        # Of which parameters the bucket held gradients when the backward was captured.
        self._before = self.site.written()

        def backward() -> Any:
            placed = [None if grad is None else torch.empty_like(grad) for grad in grads]
            reached = []
            grads_reached = []
            for output, place in zip(outputs, placed, strict=True):
                if place is not None and output.requires_grad:
                    reached.append(output)
                    grads_reached.append(place)
            # Gradients of eager calls are no part of this graph, so they are put aside.
            eager = self.site.take_grads()
            # Not `autograd.grad`, in which parts that are recomputed (checkpoints) refuse to run.
            torch.autograd.backward(reached, grads_reached)
            self.site.move_grads()
            for param, grad in eager:
                param.grad = grad
            return placed, [tensor.grad for tensor in inner]

        # Replays the backward.
        self._backward, (placed, found) = self._graphs.capture(backward, self._pool)
        alias = self._graphs.alias
        # Aliases: where the graph reads gradients of outputs, and leaves those of inputs.
        self._output_grads = [None if place is None else alias(place) for place in placed]
        self._input_grads = [None if grad is None else alias(grad) for grad in found]
        # The same, when it had run.
        self._after = self.site.written()
        return found
