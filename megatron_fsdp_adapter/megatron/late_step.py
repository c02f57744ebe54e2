"""Core's optimizer whose updates go on under the next forward (`sharding/late_optimizer.py`). The
forward of a whole iteration in a graph waits for no unit: there the step is over when it begins,
but the first units are gathered beside the updates of the others (`sharding/first_unit.py`).

The option is ours, named after the one of Megatron that overlaps gathers with the optimizer's step.
That one splits model chunks between two optimizers, before anything here is asked, and needs an
interleaved pipeline; ours is a field of the DDP config, and follows from Megatron-LM's flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..sharding.late_optimizer import OPTION
from .options.cuda_graphs import captures_iteration
from .options.support import is_on


def asked_for(chunks: Sequence[Any]) -> bool:
    """Whether the DDP configs of an optimizer's model chunks ask for it."""
    return any(is_on(chunk.ddp_config, OPTION) for chunk in chunks)


def in_whole_graphs(chunks: Sequence[Any]) -> bool:
    """Whether whole iterations of the model chunks are captured."""
    return any(captures_iteration(chunk.config) for chunk in chunks)


def problems(chunks: Sequence[Any]) -> list[str]:
    """What an optimizer's model chunks have against it."""
    if not asked_for(chunks):
        return []
    found = []
    if not all(is_on(chunk.ddp_config, OPTION) for chunk in chunks):
        found.append("it is True for some of the model chunks; set it for all or none")
    if any(chunk.engine.quantisation for chunk in chunks):
        found.append("quantised weights are made of all main weights at once, behind all updates")
    return [f"{OPTION}=True of the DDP config: {line}; set it to False" for line in found]
