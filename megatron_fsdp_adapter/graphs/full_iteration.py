"""A whole iteration in one CUDA graph (`options/cuda_graphs.py` decides when that is asked for).

Megatron captures forward and backward of all microbatches with `finalize_model_grads`, once, and
replays them; optimizer, `zero_grad_buffer` and `start_param_sync` run outside, in every iteration.
No Python code runs in a replay. So before each replay the wrapper has to be in the state that it
had before the capture, and after it in the state that it had after the capture:

    at the start of a capture   no gradients; all weights outdated, so that the graph has every
                                gather itself; the streams of gathers and reductions join it
    at its end                  the streams are back, the gradients stay attached, in storage that
                                is theirs for good: each replay overwrites it
    outside                     gradients are forgotten only by an eager training step; weights are
                                not gathered ahead; quantized ones are made again as soon as their
                                main weights have changed
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from ..core.engine.engine import FsdpEngine
from ..core.runtime.device import COMPUTE, GATHER, REDUCE


class FullIterationGraphs:
    """Watches one wrapper's calls for captures, and keeps the engine's state fit for replays.

    is_capturing: whether what is called now goes into a graph; by default the engine's runtime is
    asked. around: a context in which training iterations are captured, for libraries that have to
    know of it.
    """

    def __init__(
        self,
        engine: FsdpEngine,
        is_capturing: Callable[[], bool] | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._engine = engine
        self._is_capturing = is_capturing or engine.runtime.is_capturing
        self._around = around
        # Holds `around` from the begin of a capture to its end.
        self._entered = ExitStack()
        # A capture of a training iteration has begun, and has not ended.
        self._open = False
        # The next eager training step has to forget the gradients.
        self._stale = False
        # A capture has begun, with gradients or without.
        self._has_graphs = False
        # A training iteration was captured.
        self.captured = False

    def before_forward(self) -> None:
        """A forward pass begins, eagerly or into a graph."""
        if self._is_capturing():
            if not self._open:
                self._begin(torch.is_grad_enabled())
            return
        if self._has_graphs:  # a replay used the same buffers, unordered with our streams
            self._engine.gather.follow_compute()
        if self._stale and torch.is_grad_enabled():
            self._stale = False
            self._engine.zero_grads()

    def after_forward(self) -> None:
        """A forward pass has ended. If it had no gradients, orders compute behind all gathers: that
        ends its capture, and a replay would not wait for gathers that an eager pass launched."""
        if self._has_graphs and not self._open and not torch.is_grad_enabled():
            self._engine.gather.quiesce()

    def _begin(self, training: bool) -> None:
        engine = self._engine
        self._has_graphs = True
        engine.pin("a CUDA graph")
        roles = (GATHER, REDUCE) if training else (GATHER,)
        for role in roles:
            engine.runtime.wait(role, engine.runtime.record(COMPUTE))
        engine.gather.mark_stale()
        if training:
            engine.zero_grads()
            self._entered.enter_context(self._around())
            self._open = True

    def gradients_finished(self) -> None:
        """All gradients of a step are reduced; ends the capture, if it is in one."""
        if not self._open:
            return
        self._open = False
        self._entered.close()
        self._engine.gather.quiesce()
        for group in self._engine.groups:
            if group.key.requires_grad:
                group.grads.main.keep_storage()
        self.captured = True
        if self._engine.quantization is not None:
            self._engine.quantization.quantize_at_once()

    def keeps_gradients(self) -> bool:
        """True if gradients, which should be forgotten now, have to stay: a replay may follow. The
        next eager training step forgets them."""
        if not self.captured or self._is_capturing():
            return False
        self._stale = True
        if self._engine.switch.shows_unsharded:
            self._engine.to_sharded()
        return True
