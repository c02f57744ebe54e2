"""CUDA graphs of single modules inside of units: which graph a call replays, and when one is made.

A *pass* is a forward of the model with its backward. Its calls of captured modules are a *program*,
in the order in which they came when it was recorded: in the middle of a training step, each graph
where its call or its backward comes. Passes that may be in flight at once (stages of a pipeline)
have pools of their own; passes that use one pool come one after the other, each to its end, and
every pass gives its calls in the program's order. So what a capture may reuse of the pool at some
place of a program, a replay may overwrite at that place: memory is what one eager pass needs.

A call that cannot be captured, or does not fit (no gradients, recomputed in backward, hooks on what
autograd saves) runs eagerly, which needs no memory of the pool; the reason is printed once, and
not for evaluations. So does a whole pass whose first call has other shapes than the recorded ones:
a pool for each length would cost the activations of a pass each.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.engine import hooks
from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.unit import Unit
from ..core.runtime.rank_warnings import warn
from .capture import Graphs
from .captured import CapturedCall, NotCapturable, Site, WrittenGrads, shapes, strip

HELD_BY = "a CUDA graph of a layer"


class _Program:
    """The calls of one kind of pass; `complete` when all its backwards are captured too."""

    def __init__(self) -> None:
        self.calls: list[CapturedCall] = []
        self.complete = False


class _Pass:
    """One forward and its backward, in pool number `index` from its first captured call on."""

    def __init__(self) -> None:
        self.index, self.program, self.position = -1, None, 0
        self.outstanding, self.forward_runs, self.is_eager = 0, True, False
        self.addresses: set[int] = set()

    program: _Program | None

    def is_ours(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.addresses


class _Call(torch.autograd.Function):
    """A captured call as a node of the eager graph. Its inputs are tensors alone: weights are not,
    so that autograd accumulates no gradients of theirs."""

    @staticmethod
    def forward(
        ctx: Any, graphs: LayerGraphs, of: _Pass, call: CapturedCall, records: bool,
        unused: torch.Tensor, *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.graphs, ctx.of, ctx.call = graphs, of, call
        ctx.set_materialize_grads(False)
        outputs = call.record(tensors, of.is_ours) if records else call.replay(tensors)
        ctx.mark_non_differentiable(
            *(output for output, needs in zip(outputs, call.needs, strict=True) if not needs)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        # `once_differentiable` lets it pass where `grads` are constants.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True: a backward through {ctx.call.site.name} replays a CUDA graph, "
                "and second derivatives would lack that module. Switch the graphs off "
                "(cuda_graph_impl='none')"
            )
        found = ctx.call.backward(grads)
        ctx.graphs.backward_done(ctx.of)
        return (None, None, None, None, None, *found)


class LayerGraphs:
    """Args:
    warmup: training steps that run eagerly first: libraries choose kernels and make their
        workspaces in the first ones.
    shared: buffers that captured modules share with others and replace by larger ones.

    Attributes:
        captured, replayed: how many calls were. is_settled: calls were captured, and none in the
        step that has ended last. ran_eagerly: (module, why), of calls that did in training.
    """

    is_settled = False

    def __init__(
        self, engine: FsdpEngine, graphs: Graphs, warmup: int,
        shared: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:  # fmt: skip
        self._engine, self._graphs, self._warmup = weakref.ref(engine), graphs, max(1, warmup)
        self._device, self._shared = engine.runtime.device, shared
        self._steps = 0
        self._pools: list[Any] = []
        self._programs: dict[int, _Program] = {}
        self._kind: tuple[Site, Any] | None = None
        self._in_flight: list[_Pass] = []
        self._current: _Pass | None = None
        self.ran_eagerly: set[tuple[str, str]] = set()
        self._abandoned, self._eager_in_step = 0, False
        self._unused = torch.empty(0, device=self._device, requires_grad=True)
        self._read_by_graphs: dict[int, torch.Tensor] = {}
        self.captured = self.replayed = self._captured_before = 0

    def install(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """From now on forwards of `modules`, given with their names, go through graphs. ValueError
        if a module's weights are not those of one unit, or have no fixed place."""
        engine = self._engine()
        assert engine is not None
        me = weakref.ref(self)
        for name, module in modules:
            held, own = weakref.ref(module), type(module).forward
            grads, caches = _written_grads(engine, name, module), partial(_caches, held)
            site = Site(name, _eager(held, own), grads, caches)
            module.forward = _graphed(me, site)  # type: ignore[method-assign]

    @contextmanager
    def forward_pass(self, training: bool) -> Iterator[None]:
        """Around a forward of the model. training: whether a backward will follow."""
        if training and torch.is_grad_enabled() and self._steps >= self._warmup:
            self._current = _Pass()
        try:
            yield
        finally:
            current, self._current = self._current, None
            if current is not None:
                current.forward_runs = False
                self._end_if_over(current)

    def step_done(self) -> None:
        """A training step's gradients are complete."""
        self._steps += 1
        self._eager_in_step = False
        self.is_settled = 0 < self.captured == self._captured_before
        self._captured_before = self.captured

    def pool_bytes(self) -> list[int]:
        """Of device memory, of each pool: as many as there were passes in flight at a time."""
        return [self._graphs.pool_bytes(pool) for pool in self._pools]

    def reset(self) -> None:
        """Nothing is in flight any more: a step is over, or was given up. RuntimeError if
        recordings come to no end."""
        self._eager_in_step = False
        if not self._in_flight:
            return
        unfinished = [one for one in self._in_flight if one.program and not one.program.complete]
        self._in_flight = []
        if unfinished:
            lost = {id(one.program) for one in unfinished}
            self._programs = {k: v for k, v in self._programs.items() if id(v) not in lost}
            self._kind = self._kind if self._programs else None
            self._abandoned += 1
        if self._abandoned > 2:
            raise RuntimeError(
                "CUDA graphs of layers: three training steps were captured in which backward did "
                "not reach all captured modules; switch the graphs off (cuda_graph_impl='none')"
            )

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module's forward: its graph, if there is one or it is time to make it."""
        current = self._current
        is_training = current is not None and not current.is_eager and torch.is_grad_enabled()
        if current is None or not is_training or hooks.in_backward():
            return site.function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        try:
            self._refuse_hooks()
            template = strip((args, kwargs), tensors)
        except NotCapturable as error:
            return self._eagerly(site, str(error), args, kwargs)
        unfit = self._begin(current, site, template) if current.program is None else ""
        if unfit:
            current.is_eager = self._eager_in_step = True
            return self._eagerly(site, unfit, args, kwargs, f" ({shapes(template)})")
        program = current.program
        assert program is not None
        if program.complete:
            call = self._next(current, site, template, tensors)
            if call is None:
                return self._eagerly(site, "its inputs are not as captured", args, kwargs)
        else:
            call = CapturedCall(site, template, self._graphs, self._pools[current.index])
        return self._run(current, program, call, tensors)

    def _run(
        self, current: _Pass, program: _Program, call: CapturedCall,
        tensors: Sequence[torch.Tensor],
    ) -> Any:  # fmt: skip
        records = not program.complete
        outputs = _Call.apply(self, current, call, records, self._unused, *tensors)
        current.outstanding += call.needs_backward
        if records:
            program.calls.append(call)
            # A longer sequence, which runs eagerly, makes a module replace its table of positions.
            caches = (*call.site.caches(), *self._shared())
            self._read_by_graphs.update((id(one), one) for one in caches)
            current.addresses.update(output.data_ptr() for output in outputs)
            self.captured += 1
        else:
            self.replayed += 1
        return call.output(outputs)

    def _begin(self, current: _Pass, site: Site, template: Any) -> str:
        """The first call of a pass: gives it a pool that is free. Why it is to run eagerly, if it
        is: empty if not."""
        if self._kind not in (None, (site, template)):
            return "inputs have other shapes, or values, than were captured"
        used = {one.index for one in self._in_flight}
        index = next(i for i in itertools.count() if i not in used)
        if index not in self._programs and self._eager_in_step:
            # Its backward may be to come: its nodes that accumulate gradients are on its stream.
            return "it would be captured behind a pass that runs eagerly and may be in flight"
        if index == len(self._pools):
            self._pools.append(self._graphs.new_pool())
        engine = self._engine()
        if self._kind is None and engine is not None:
            engine.memory.pinned_by = HELD_BY
        self._kind = (site, template)
        current.index = index
        current.program = self._programs.setdefault(index, _Program())
        self._in_flight.append(current)
        return ""

    def _next(
        self, current: _Pass, site: Site, template: Any, tensors: Sequence[torch.Tensor]
    ) -> CapturedCall | None:
        """The program's next call of `site`; those in front of it, which did not come, are left
        out."""
        assert current.program is not None
        calls = current.program.calls
        for position in range(current.position, len(calls)):
            call = calls[position]
            if call.site is site and call.template == template:
                if not call.accepts(tensors):
                    return None
                current.position = position + 1
                return call
        return None

    def _refuse_hooks(self) -> None:
        found = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
        if found is not None:
            raise NotCapturable("hooks are on what autograd saves, which a replay does not call")

    def _eagerly(
        self, site: Site, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any],
        at_first: str = "",
    ) -> Any:  # fmt: skip
        """at_first: printed beside the reason in the first call that it holds for."""
        if (site.name, reason) not in self.ran_eagerly:
            self.ran_eagerly.add((site.name, reason))
            warn(f"{site.name} runs without its CUDA graph: {reason}{at_first}")
        return site.function(*args, **kwargs)

    def backward_done(self, of: _Pass) -> None:
        """The backward of one captured call has run."""
        of.outstanding -= 1
        self._end_if_over(of)

    def _end_if_over(self, of: _Pass) -> None:
        if of.outstanding or of.forward_runs or of not in self._in_flight:
            return
        self._in_flight.remove(of)
        if of.program is not None:
            of.program.complete = True


def _eager(
    module: Callable[[], nn.Module | None], own: Callable[..., Any]
) -> Callable[..., Any]:
    """The module's own forward. The module is held weakly: it has what holds this."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(module(), *args, **kwargs)

    return forward


def _caches(module: Callable[[], nn.Module | None]) -> Iterator[torch.Tensor]:
    alive = module()
    for child in () if alive is None else alive.modules():
        for value in (*vars(child).values(), *child._buffers.values()):
            if isinstance(value, torch.Tensor):
                yield value


def _graphed(graphs: Callable[[], LayerGraphs | None], site: Site) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        alive = graphs()
        if alive is None:
            return site.function(*args, **kwargs)
        return alive.call(site, args, kwargs)

    return forward


def _written_grads(
    engine: FsdpEngine, name: str, module: nn.Module
) -> tuple[WrittenGrads, ...]:
    """The parts of buckets that the module's weight gradients go to, which from now on are open
    from the start of its unit's backward."""
    inside = {id(child) for child in module.modules()}
    units = [
        unit for unit in engine.units if any(_held_by(inside, group) for group in unit.groups)
    ]
    if len(units) != 1:
        raise ValueError(
            f"{name}: a CUDA graph needs all weights gathered at once, and its weights are in "
            f"{len(units)} units ({', '.join(unit.name for unit in units) or 'none'})"
        )
    (unit,) = units
    found = []
    for group in unit.groups:
        indices = _held_by(inside, group)
        if not indices:
            continue
        _check_fixed(unit, group)
        if group.key.requires_grad:
            group.direct.any = True
            found.append(WrittenGrads(group, indices))
    unit.find_direct()
    return tuple(found)


def _held_by(modules: set[int], group: ParamGroup) -> tuple[int, ...]:
    """Which of the group's parameters any of these modules, given by their ids, holds."""
    return tuple(
        index
        for index, entry in enumerate(group.managed)
        if any(id(owner) in modules for owner, _ in entry.slots)
    )


def _check_fixed(unit: Unit, group: ParamGroup) -> None:
    """ValueError unless the group's buffers stay where they are."""
    strategy = group.config.strategy
    weights = not strategy.shard_weights or all(full.in_slot for full in group.weights)
    bucket = not group.key.requires_grad or (strategy.shard_grads and group.bucket.in_slot)
    if not (weights and bucket):
        raise ValueError(
            f"unit {unit.name}: CUDA graphs of layers need weights and buckets of sharded "
            "gradients at fixed addresses: use 'optim_grads' or 'optim_grads_params' with "
            "fsdp_double_buffer"
        )
