"""Mistakes to put into the engine of a process, to show that a proof sees and names them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.engine import construction
from megatron_fsdp_adapter.core.engine.gather import GatherPipeline


def wait_for_ever() -> None:
    time.sleep(1e6)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("of rank 1")
    wait_for_ever()


UNIT = "decoder.layers.1"


def scale_twice() -> None:
    """1 / ranks is applied to what came out of a reduction, and once more."""
    original = construction.domain_reduces

    def twice(*args: Any) -> Any:
        found = {}
        for name, one in original(*args).items():
            found[name] = dataclasses.replace(one, scale=one.scale**2)
        return found

    construction.domain_reduces = twice


def keep_old_weights() -> None:
    """After a step, what was gathered before it is taken for current."""
    GatherPipeline.mark_stale = lambda self: None  # type: ignore[method-assign]


def load_rows_of_others() -> None:
    """A load puts rows of a matrix one too far."""
    from megatron_fsdp_adapter import checkpoint

    original = checkpoint.load_training_state

    def load(chunks: Sequence[Any], state: Any, optimizer: Any = None) -> None:
        original(chunks, state, optimizer)
        for chunk in chunks:
            for pair in chunk.engine.pairs:
                if UNIT in pair.managed.fqns[0] and pair.unsharded.ndim == 2:
                    local = pair.sharded._local_tensor
                    with torch.no_grad():
                        local.copy_(local.roll(1, 0))

    checkpoint.load_training_state = load
