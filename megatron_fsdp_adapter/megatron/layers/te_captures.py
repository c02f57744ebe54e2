"""Tells Transformer Engine of captures, as its own graphs and core's graphs of layers do.

With cuDNN before 9.15.1 the backward of fused attention writes out of bounds when it is replayed,
if the length of the sequences is no multiple of 128 (TransformerEngine#2344). TE takes another
attention then, but only in a capture that it knows of.

Core's own flag (`transformer.cuda_graphs.is_graph_capturing`) stays off: with it core would not
recompute in a capture what is to be recomputed (`recompute_modules`). It changes nothing else that
is captured here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from ..options.cuda_graphs import scales_by_delayed_recipe

# They are imported if a model has layers of TE.
_GRAPH = "transformer_engine.pytorch.graph"
_TRACKER = "transformer_engine.pytorch.distributed"


@contextmanager
def telling_te() -> Iterator[None]:
    """A capture that Transformer Engine knows of."""
    graph = sys.modules.get(_GRAPH)
    if graph is None:
        yield
        return
    graph.set_capture_start()
    try:
        yield
    finally:
        graph.set_capture_end()


def telling_te_of_an_iteration(module: nn.Module, config: Any) -> AbstractContextManager[None]:
    """The context of a capture of a whole iteration. It tells TE of it, which core does not do.

    Under delayed scaling it tells nothing: TE would leave the update of scales out of the graph.
    Nor does it with another tracker of random numbers than TE's, which TE would not accept."""
    if scales_by_delayed_recipe(config) or other_tracker(module) is not None:
        return nullcontext()
    return telling_te()


def other_tracker(module: nn.Module) -> Any:
    """The tracker of random numbers of TE's attention, if it is not TE's own; else None."""
    te = sys.modules.get(_TRACKER)
    if te is None:
        return None
    for child in module.modules():
        tracker = getattr(child, "rng_states_tracker", None)
        if tracker is not None and not isinstance(tracker, te.CudaRNGStatesTracker):
            return tracker
    return None


def check_tracker(module: nn.Module) -> None:
    """Checks that TE's attention draws random numbers from TE's own tracker, the only one that it
    accepts in a capture.

    Raises:
        ValueError: it has another one.
    """
    tracker = other_tracker(module)
    if tracker is not None:
        raise ValueError(
            "cuda_graph_impl='local': Transformer Engine's attention is captured with random "
            f"numbers of its own tracker alone, and has a {type(tracker).__name__}. Set "
            "use_te_rng_tracker=True (--te-rng-tracker), or te_rng_tracker=True where "
            "model_parallel_cuda_manual_seed is called"
        )
