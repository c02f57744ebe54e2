"""A whole iteration in one CUDA graph: `cuda_graph_impl="full_iteration"`, which before
megatron-core 0.18 was `"local"` with the scope `full_iteration`.

Megatron captures forward and backward of all microbatches with `finalize_model_grads`, once, and
replays them; optimizer, `zero_grad_buffer` and `start_param_sync` run outside, in every iteration.
Nothing of Python runs in a replay, so between two replays the wrapper has to be what it was before
the capture, and after one what it was after it:

    at the start of a capture   no gradients; all weights outdated, so that the graph has every
                                gather itself; the streams of gathers and reductions join it
    at its end                  the streams are back, the gradients stay attached, in storage that
                                is theirs for good: each replay overwrites it
    outside                     gradients are forgotten only by an eager training step; weights are
                                not gathered ahead, since a graph cannot wait for that

The alternative, gathering the first unit outside of the graph, needs an event that the graph waits
for, which CUDA has (external events) and torch 2.11 does not offer for a capture by somebody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.engine.engine import FsdpEngine
from ..core.runtime.device import COMPUTE, GATHER, REDUCE

LOCAL, FULL_ITERATION = "local", "full_iteration"


def captures_iteration(config: Any) -> bool:
    """Whether the model config asks for full-iteration graphs, and for no others."""
    impl = getattr(config, "cuda_graph_impl", "none")
    if impl == FULL_ITERATION:
        return True
    scope = getattr(config, "cuda_graph_scope", None)
    scopes = scope if isinstance(scope, (list, tuple)) else [scope]
    names = {getattr(one, "name", one) for one in scopes}
    return impl == LOCAL and names == {FULL_ITERATION}


def problems(
    config: Any, ddp_config: Any, device: torch.device, asks_tokens: bool = True
) -> list[str]:
    """One line for each option that full-iteration graphs exclude. `asks_tokens`: core waits in
    mid-step for the number of tokens (`core_api.asks_tokens_on_the_host`)."""
    if not captures_iteration(config):
        return []
    found = []
    if device.type != "cuda":
        found.append(
            f"cuda_graph_impl={config.cuda_graph_impl!r}: the model is on {device}, where there "
            "are no CUDA graphs; use 'none'"
        )
    if asks_tokens and getattr(config, "calculate_per_token_loss", False):
        found.append(
            "calculate_per_token_loss=True with full-iteration CUDA graphs: this megatron-core "
            "asks on the host how many tokens there were, in the middle of the step; set it to "
            "False, or use 0.18 or later"
        )
    if getattr(ddp_config, "check_for_nan_in_grad", False):
        found.append(
            "check_for_nan_in_grad=True with full-iteration CUDA graphs: a captured step cannot "
            "raise; set it to False (--no-check-for-nan-in-loss-and-grad)"
        )
    return found


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Captures:
    """Watches one wrapper's calls for captures, and keeps the engine's state fit for replays.

    is_capturing: whether what is called now goes into a graph.
    """

    def __init__(
        self, engine: FsdpEngine, is_capturing: Callable[[], bool] = is_capturing
    ) -> None:
        self._engine, self._is_capturing = engine, is_capturing
        self._open = False
        self._stale = False
        self._has_graphs = False
        self.captured = False

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
        engine, self._has_graphs = self._engine, True
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

    def keeps_gradients(self) -> bool:
        """Gradients should be forgotten. True if that has to wait, as a replay may follow."""
        if not self.captured or self._is_capturing():
            return False
        self._stale = True
        self._engine.show_optimizer_params()
        return True
