"""A whole iteration in one CUDA graph (`options/cuda_graphs.py` says when that is asked for).

Megatron captures forward and backward of all microbatches with `finalize_model_grads`, once, and
replays them; optimizer, `zero_grad_buffer` and `start_param_sync` run outside, in every iteration.
Nothing of Python runs in a replay, so between two replays the wrapper has to be what it was before
the capture, and after one what it was after it:

    at the start of a capture   no gradients; all weights outdated, so that the graph has every
                                gather itself but those of the first units; the streams of gathers
                                and reductions join it
    at its end                  the streams are back, the gradients stay attached, in storage that
                                is theirs for good: each replay overwrites it
    before each call            the first units' weights are in their slots: gathered by the step of
                                the optimizer (`sharding/first_unit.py`), or now; the compute stream
                                is behind them
    after each call             they are gone, unless they are kept: the graph may have put others
                                into the same slots
    outside                     gradients are forgotten only by an eager training step; other
                                weights are not gathered ahead; quantised ones are made anew as soon
                                as their main weights have changed

The first units are gathered outside where they have fixed slots or are kept, so that a graph may
know their addresses, and where core's wrapper is called, so that we run before each replay.
Elsewhere (no slots, quantised weights, a graph that somebody captures by himself) a graph gathers
them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core.engine.engine import FsdpEngine
from ..core.engine.identity import Identity
from ..core.engine.memory import READ
from ..core.engine.unit import Phase, Unit
from ..core.runtime.device import COMPUTE, GATHER, REDUCE
from ..sharding import first_unit
from .inner import ours_among


class Captures:
    """Watches one wrapper's calls for captures, and keeps the engine's state fit for replays.

    early: whether the first units' gathers stay outside of graphs.
    is_capturing: whether what is called now goes into a graph; by default the engine's runtime is
    asked.
    """

    def __init__(
        self, engine: FsdpEngine, early: bool, is_capturing: Callable[[], bool] | None = None
    ) -> None:
        self._engine, self._early = engine, early
        self._is_capturing = is_capturing or engine.runtime.is_capturing
        self._open = False
        self._stale = False
        self._has_graphs = False
        self._in_call = False
        self._outside: list[Unit] = []
        self.captured = False

    @property
    def gathers_early(self) -> bool:
        """Whether the next forward finds what was gathered ahead of it: no graph gathers that by
        itself."""
        return bool(self._outside) or not self._has_graphs

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """A call of core's wrapper, which runs a schedule, captures it or replays it. Where a graph
        is captured inside, what was gathered in front of it stays outside of all graphs."""
        units = self._outside if self._has_graphs else self._first_units()
        if not units:
            yield
            return
        gather = self._engine.gather
        self._engine.memory.check("using the model", READ)
        if self._engine.switch.shown is Identity.OPTIMIZER:
            gather.invalidate()
        gather.follow_compute()
        self._require(units)
        self._in_call, self._outside = True, units
        try:
            yield
        finally:
            self._in_call = False
            gather.early = []
            if not self._has_graphs:
                self._outside = []
            for unit in self._outside:
                if unit.phase is Phase.READY:
                    gather.release(unit)

    def _require(self, units: list[Unit]) -> None:
        """Orders the compute stream behind the weights of `units`, which are gathered now unless
        they are there or on their way; the forward takes them for current."""
        for unit in units:
            self._engine.gather.require(unit)
        self._engine.gather.early = units

    def _first_units(self) -> list[Unit]:
        """What stays outside of graphs: nothing if anything of it has no address for good."""
        if not self._early:
            return []
        units = first_unit.first_units(self._engine)
        fixed = all(unit.weight_slot is not None or unit.keeps_weights for unit in units)
        return units if fixed and self._engine.quantisation is None else []

    def before_forward(self) -> None:
        """A forward pass begins, eagerly or into a graph."""
        if self._is_capturing():
            if not self._open:
                self._begin(torch.is_grad_enabled())
            return
        if self._has_graphs:  # a replay used the same buffers, and told no stream of ours
            self._engine.gather.follow_compute()
        if self._stale and torch.is_grad_enabled():
            self._stale = False
            self._engine.zero_grads()

    def after_forward(self) -> None:
        """A forward pass has ended. Without gradients that ends its capture too; and a replay does
        not wait for what was gathered ahead of an eager one."""
        if self._has_graphs and not self._open and not torch.is_grad_enabled():
            self._engine.gather.quiesce()

    def _begin(self, training: bool) -> None:
        if self._outside and not self._in_call:
            raise RuntimeError(
                "a forward is captured outside of megatron-core's FullCudaGraphWrapper, and graphs "
                "that the wrapper has captured share buffers with it; let the wrapper capture both"
            )
        engine, self._has_graphs = self._engine, True
        engine.memory.held_by = "a CUDA graph"
        for role in (GATHER, REDUCE) if training else (GATHER,):
            engine.runtime.wait(role, engine.runtime.record(COMPUTE))
        engine.gather.invalidate()
        if training:
            engine.zero_grads()
            self._open = True

    def gradients_finished(self) -> None:
        """All gradients of a step are reduced; ends the capture, if it is in one."""
        if not self._open:
            return
        self._open = False
        self._engine.gather.quiesce()
        for group in self._engine.groups:
            if group.key.requires_grad:
                group.grad.keep()
        self.captured = True
        if self._engine.quantisation is not None:
            self._engine.quantisation.at_once = True

    def keeps_gradients(self) -> bool:
        """Gradients should be forgotten. True if that has to wait, as a replay may follow."""
        if not self.captured or self._is_capturing():
            return False
        self._stale = True
        if self._engine.switch.shown is Identity.RAW:
            self._engine.show_optimizer_params()
        return True


def _call(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Of the model chunks that a rank runs, the first."""
    model = kwargs.get("model")
    ours = ours_among(model if isinstance(model, list) else [model])
    if not ours:
        return original(self, *args, **kwargs)
    with ours[0].captures.iteration():
        return original(self, *args, **kwargs)
