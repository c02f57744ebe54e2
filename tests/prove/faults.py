"""Mistakes to put into the engine of a process, to show that a proof sees and names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_fsdp_adapter.core.engine.gather import GatherPipeline
from megatron_fsdp_adapter.core.engine.reduce import ReducePipeline

UNIT = "decoder.layers.1"


def scale_twice() -> None:
    """1 / ranks is applied to what came out of a reduction, and once more."""
    original = ReducePipeline._scale_after

    def twice(self: ReducePipeline, group: Any) -> float:
        return original(self, group) ** 2

    ReducePipeline._scale_after = twice  # type: ignore[method-assign]


def lose_last_microbatch_of_a_unit() -> None:
    """What the reduction of a unit's last microbatch gave is not added to the shard."""
    original = ReducePipeline._land
    seen: dict[int, int] = {}

    def land(self: ReducePipeline, groups: Sequence[Any], first: Sequence[bool]) -> None:
        if all(UNIT in group.managed[0].fqns[0] for group in groups):
            number = seen[id(self)] = seen.get(id(self), 0) + 1
            if number % 3 == 0:
                return
        original(self, groups, first)

    ReducePipeline._land = land  # type: ignore[method-assign]


def keep_old_weights() -> None:
    """After a step, what was gathered before it is taken for current."""
    GatherPipeline.invalidate = lambda self: None  # type: ignore[method-assign]


def load_rows_of_others() -> None:
    """A load puts rows of a matrix one too far."""
    from megatron_fsdp_adapter import checkpoint

    original = checkpoint.load_training_state

    def load(chunks: Sequence[Any], state: Any, optimizer: Any = None) -> None:
        original(chunks, state, optimizer)
        for chunk in chunks:
            for pair in chunk.engine.pairs:
                if UNIT in pair.managed.fqns[0] and pair.raw.ndim == 2:
                    local = pair.optimizer._local_tensor
                    with torch.no_grad():
                        local.copy_(local.roll(1, 0))

    checkpoint.load_training_state = load
