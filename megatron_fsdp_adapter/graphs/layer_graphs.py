"""CUDA graphs of single modules inside of units: which graph a call replays, and when one is made.

A *pass* is a forward of the model with its backward. Its calls of captured modules are a *program*,
in the order in which they came when it was recorded. It is recorded in the middle of a training
step, each graph where its call or its backward comes. Passes that may be in flight at once (stages
of a pipeline) have pools of their own. Passes that use one pool come one after the other, each to
its end, and every pass gives its calls in the program's order. So what a capture may reuse of the
pool at some place of a program, a replay may overwrite at that place: memory is what one eager pass
needs.

Weights and gradients of captured modules have fixed addresses: in slots, or as their unit stays
unsharded over a step. Which units stay may be known after some steps only, and may change; then all
graphs are forgotten, and made again for the modules of the units that stay. Modules of other units
run eagerly. Graphs are made again as well when a step has several microbatches for the first time:
gradients are added up from then on.

A call that cannot be captured, or does not fit (no gradients, recomputed in backward, hooks on what
autograd saves) runs eagerly, which needs no memory of the pool; the reason is printed once, and
not for evaluations. So does a whole pass whose first call has other shapes than the recorded ones:
a pool for each length would cost the activations of a pass each.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.engine import hooks
from ..core.engine.engine import FsdpEngine
from ..core.engine.step import Last
from ..core.runtime.rank_warnings import warn
from .capture import CudaGraphs
from .captured import CapturedCall, strip
from .sites import Site, fix_memory, site_of

HELD_BY = "a CUDA graph of a layer"


@dataclasses.dataclass(eq=False)
class Pass:
    """One forward and its backward.

    Attributes:
        index: of its pool; -1 before its first captured call.
        calls: its program. If it `records`, it makes that.
        position: in `calls`, behind the last one that came.
        outstanding: how many calls wait for their backward.
        is_eager: none of its calls goes through a graph.
        addresses: of what its graphs have returned.
    """

    index: int = -1
    calls: list[CapturedCall] = dataclasses.field(default_factory=list)
    records: bool = False
    position: int = 0
    outstanding: int = 0
    forward_runs: bool = True
    is_eager: bool = False
    addresses: set[int] = dataclasses.field(default_factory=set)


class _Call(torch.autograd.Function):
    """A captured call as a node of the eager graph. Its inputs are tensors alone: weights are not,
    so that autograd accumulates no gradients of theirs."""

    @staticmethod
    def forward(
        ctx: Any,
        graphs: LayerGraphs,
        of: Pass,
        call: CapturedCall,
        unused: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.graphs = graphs
        ctx.of = of
        ctx.call = call
        ctx.set_materialize_grads(False)
        if of.records:
            outputs = call.record(tensors, of.addresses)
        else:
            outputs = call.replay(tensors)
        pairs = zip(outputs, call.needs, strict=True)
        ctx.mark_non_differentiable(*(output for output, needs in pairs if not needs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        # Not torch's `once_differentiable`: it raises nothing where `grads` are constants.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True: a backward through {ctx.call.site.name} replays a CUDA graph, "
                "and second derivatives would lack that module. Switch the graphs off "
                "(cuda_graph_impl='none')"
            )
        found = ctx.call.backward(grads)
        ctx.graphs.backward_done(ctx.of)
        return (None, None, None, None, *found)


class LayerGraphs:
    """CUDA graphs of layers: from construction on, forwards of `modules` go through graphs.

    Args:
        modules: with their names.
        warmup: training steps that run eagerly first: libraries choose kernels and make their
            workspaces in the first ones.
        shared: buffers that captured modules share with others and replace by larger ones.
        before_pass: called before each forward of the model.

    Raises:
        ValueError: a module's weights are not those of one unit, or have no fixed place.
    """

    def __init__(
        self,
        engine: FsdpEngine,
        graphs: CudaGraphs,
        modules: Sequence[tuple[str, nn.Module]],
        warmup: int,
        shared: Callable[[], Iterable[torch.Tensor]] = tuple,
        before_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._graphs = graphs
        self._warmup = max(1, warmup)
        self._shared = shared
        self._before_pass = before_pass
        # Classes of the modules.
        self._kinds = Counter(type(one).__name__ for _, one in modules)
        # How many training steps were done.
        self._steps = 0
        # How many calls were captured, and how many replayed.
        self.captured = 0
        self.replayed = 0
        # Of `captured`, at the end of the last step.
        self._captured_before = 0
        # The summary was printed.
        self._is_reported = False
        # All captured modules.
        self._sites: list[Site] = []
        # Those whose weights and gradients have fixed addresses.
        self._fixed: set[Site] = set()
        # Graphs add to the gradients of earlier microbatches, where these are kept.
        self._adds = False
        # `_fixed` was looked at in this step.
        self._is_chosen = False
        # A pass of this step has run eagerly.
        self._eager_in_step = False
        # One for each pass that may be in flight, by its index.
        self._pools: list[Any] = []
        # Recorded, by the index of the pool.
        self._programs: dict[int, list[CapturedCall]] = {}
        # The first call of every pass; None before one was recorded.
        self._kind: tuple[Site, Any] | None = None
        # Passes with a pool that have not come to their end.
        self._in_flight: list[Pass] = []
        # The pass whose forward runs, if that may use graphs.
        self._current: Pass | None = None
        # (module, why), of calls that did in training.
        self.ran_eagerly: set[tuple[str, str]] = set()
        # Steps whose recordings came to no end.
        self._abandoned = 0
        # An input that needs a gradient, so that every call has a backward.
        self._unused = torch.empty(0, device=engine.runtime.device, requires_grad=True)
        # By id: what graphs read has to stay where it is.
        self._read_by_graphs: dict[int, torch.Tensor] = {}
        me = weakref.ref(self)
        for name, module in modules:
            site = site_of(engine, name, module)
            self._sites.append(site)
            module.forward = _graphed(me, site)  # type: ignore[method-assign]

    @contextmanager
    def forward_pass(self, training: bool) -> Iterator[None]:
        """Around a forward of the model. training: whether a backward will follow."""
        self._before_pass()
        if training and torch.is_grad_enabled() and self._steps >= self._warmup:
            self._choose()
            self._current = Pass() if self._fixed else None
        try:
            yield
        finally:
            current = self._current
            self._current = None
            if current is not None:
                current.forward_runs = False
                self._end_if_over(current)

    def _choose(self) -> None:
        """Chooses the modules that are captured, once a step, before its first pass."""
        budget = self._engine.budget
        if self._is_chosen or (budget is not None and not budget.is_settled):
            return
        self._is_chosen = True
        if self._engine.has_grads:
            return
        fixed = {site for site in self._sites if site.may_be_fixed}
        adds = any(site.keeps_grads for site in fixed)
        # With one microbatch gradients are overwritten, which saves zeros and reading them.
        adds = adds and (self._adds or self._engine.is_last is not Last.YES)
        if (fixed, adds) == (self._fixed, self._adds):
            return
        self._forget_graphs()
        fix_memory(self._engine, self._sites, fixed, adds)
        self._fixed = fixed
        self._adds = adds
        _forget_graphs_in_cycles(len(fixed))

    def _forget_graphs(self) -> None:
        """Deletes all graphs, with their memory, and has the device ready for others."""
        if self._programs:
            self._graphs.wait()
        self._programs = {}
        self._pools = []
        self._kind = None
        self._read_by_graphs = {}
        self._captured_before = 0
        self.captured = 0
        self._is_reported = False
        self._graphs.make_room()

    def step_done(self) -> None:
        """Ends a training step, whose gradients are complete. After the first step in which nothing
        more was captured, prints the summary on one rank."""
        self._steps += 1
        self._eager_in_step = False
        self._is_chosen = False
        is_settled = 0 < self.captured == self._captured_before
        self._captured_before = self.captured
        if is_settled and not self._is_reported:
            self._is_reported = True
            if dist.get_rank() == 0:
                print(self.summary(), flush=True)

    def summary(self) -> str:
        """Text that names what is captured, in how much memory, and which calls ran eagerly and
        why."""
        modules = ", ".join(f"{count} {kind}" for kind, count in self._kinds.items())
        sizes = [self._graphs.pool_bytes(pool) / 2**30 for pool in self._pools]
        pools = " + ".join(f"{size:.3f}" for size in sizes)
        eager = ""
        for name, why in sorted(self.ran_eagerly):
            eager += f"; {name} ran eagerly: {why}"
        sharded = len(self._sites) - len(self._fixed)
        if sharded:
            eager = f"; {sharded} ran eagerly: their units do not stay unsharded{eager}"
        return (
            f"CUDA graphs of layers: {modules}, {self.captured} calls captured; GiB of "
            f"memory for each pass in flight: {pools}{eager}"
        )

    def reset(self) -> None:
        """Forgets the passes in flight: a step is over, or was given up. Raises RuntimeError if the
        recordings of three steps came to no end."""
        self._eager_in_step = False
        self._is_chosen = False
        unfinished = any(one.records for one in self._in_flight)
        self._in_flight = []
        if unfinished:
            if not self._programs:
                self._kind = None
            self._abandoned += 1
        if self._abandoned > 2:
            raise RuntimeError(
                "CUDA graphs of layers: three training steps were captured in which backward did "
                "not reach all captured modules. Switch the graphs off (cuda_graph_impl='none')"
            )

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module's forward: its graph, if there is one or it is time to make it."""
        current = self._current
        is_training = current is not None and not current.is_eager and torch.is_grad_enabled()
        if current is None or site not in self._fixed:
            return site.function(*args, **kwargs)
        if not is_training or hooks.in_backward():
            return site.function(*args, **kwargs)
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # type: ignore[attr-defined]
            reason = "saved-tensor hooks are active, and a replay does not call them"
            return self._eagerly(site, reason, args, kwargs)
        tensors: list[torch.Tensor] = []
        try:
            template = strip((args, kwargs), tensors)
        except TypeError as error:
            return self._eagerly(site, str(error), args, kwargs)
        if current.index < 0:
            unfit = self._begin(current, site, template)
            if unfit:
                current.is_eager = True
                self._eager_in_step = True
                return self._eagerly(site, unfit, args, kwargs)
        if current.records:
            call = CapturedCall(site, template, self._graphs, self._pools[current.index])
            return self._run(current, call, tensors)
        known = self._next(current, site, template, tensors)
        if known is None:
            return self._eagerly(site, "its inputs are not as captured", args, kwargs)
        return self._run(current, known, tensors)

    def _run(self, current: Pass, call: CapturedCall, tensors: Sequence[torch.Tensor]) -> Any:
        outputs = _Call.apply(self, current, call, self._unused, *tensors)
        current.outstanding += any(call.needs)  # only such a call has a backward
        if current.records:
            current.calls.append(call)
            # A longer sequence, which runs eagerly, makes a module replace its table of positions.
            caches = (*call.site.caches(), *self._shared())
            self._read_by_graphs.update((id(one), one) for one in caches)
            current.addresses.update(output.data_ptr() for output in outputs)
            self.captured += 1
        else:
            self.replayed += 1
        return call.output(outputs)

    def _begin(self, current: Pass, site: Site, template: Any) -> str:
        """Gives a pass a free pool, at its first call. Returns why the pass has to run eagerly
        instead; "" if it need not."""
        if self._kind not in (None, (site, template)):
            return "inputs have other shapes, or values, than were captured"
        used = {one.index for one in self._in_flight}
        index = next(i for i in itertools.count() if i not in used)
        records = index not in self._programs
        if records and self._eager_in_step:
            # The backward of that pass may still come, and its nodes that accumulate gradients
            # belong to its stream and not to the capture's.
            return "it would be captured behind a pass that runs eagerly and may be in flight"
        if index == len(self._pools):
            self._pools.append(self._graphs.new_pool())
        self._engine.pin(HELD_BY)
        self._kind = (site, template)
        current.index = index
        current.records = records
        current.calls = [] if records else self._programs[index]
        self._in_flight.append(current)
        return ""

    def _next(
        self, current: Pass, site: Site, template: Any, tensors: Sequence[torch.Tensor]
    ) -> CapturedCall | None:
        """The program's next call of `site` with such inputs, or None. Calls before it, which did
        not come, are skipped."""
        for position in range(current.position, len(current.calls)):
            call = current.calls[position]
            if call.site is site and call.template == template:
                if not call.accepts(tensors):
                    return None
                current.position = position + 1
                return call
        return None

    def _eagerly(
        self, site: Site, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        named = (site.name, reason)
        if named not in self.ran_eagerly:
            self.ran_eagerly.add(named)
            warn(f"{site.name} runs without its CUDA graph: {reason}")
        return site.function(*args, **kwargs)

    def backward_done(self, of: Pass) -> None:
        """Counts one captured call whose backward has run. Ends the pass if it was the last."""
        of.outstanding -= 1
        self._end_if_over(of)

    def _end_if_over(self, of: Pass) -> None:
        if of.outstanding or of.forward_runs or of not in self._in_flight:
            return
        self._in_flight.remove(of)
        self._programs[of.index] = of.calls


def _forget_graphs_in_cycles(layers: int) -> None:
    """Frees old autograd graphs that reference cycles keep. Called once, before the first captures.

    Torch's hooks on several tensors at a time, as on the inputs of experts, keep nodes of the graph
    in a cycle. A capture would use the old nodes that add gradients to weights. Python's collector
    frees such cycles, but does not see past nodes that others point to: so it takes up to one round
    for each of the `layers`."""
    for _ in range(1 + layers):
        if not gc.collect():
            return


def _graphed(graphs: Callable[[], LayerGraphs | None], site: Site) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        alive = graphs()
        if alive is None:
            return site.function(*args, **kwargs)
        return alive.call(site, args, kwargs)

    return forward
