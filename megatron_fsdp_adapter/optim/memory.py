"""A wrapped model's memory on the device, given back between training and generation.

    release_memory(model, optimizer)        # another engine generates on the same device
    return_memory(model, optimizer)         # and training goes on, bit for bit
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..core.engine.engine import FsdpEngine
from ..core.engine.memory import KINDS, MAIN
from ..core.runtime.device import Runtime
from ..core.runtime.host_stash import HostStash, Storages
from ..quantized import memory_of
from ..sharding.export_source import Source, sources
from ..sharding.problems import raise_problems
from .local_optimizer import LocalShards

OPTIMIZER = "optimizer"
ALL_KINDS = (*KINDS, OPTIMIZER)


def release_memory(
    model: Any, optimizer: Any = None, *, keep: str | Collection[str] = ()
) -> dict[str, int]:
    """Gives the wrapper's memory on the device back, also to other processes; returns the bytes of
    each kind. Main weights, parameters that were left alone, quantized weights and the optimizer's
    state go to pinned memory of the host, which is kept for the next time. Compute weights that
    main weights give, gradient buffers, buckets and slots are dropped. Gradients are forgotten, as
    `zero_grad` does. Using the model or the optimizer is an error until `return_memory`. To be
    called between two steps, any number of times: what is released stays so. No collective.

    Memory that is registered with NCCL (`nccl_ub`, copy engines) stays, and is not counted.

    Args:
        model: what `FullyShardedDataParallel` or `fully_shard_model` gave, or a list of chunks.
        optimizer: the sharded one, or Megatron's; without it, its state stays.
        keep: kinds that stay: "main_weights" (all that `export_weights` needs, unless quantized),
            "compute_weights", "gradients", "slots", "optimizer".

    Raises:
        ValueError: a wrong kind; an optimizer that is not over a wrapped model.
        RuntimeError: a CUDA graph has addresses of what is not kept.
    """
    chosen = _chosen("keep", keep)
    kinds = [kind for kind in KINDS if kind not in chosen]
    chunks, shards = sources(model), local_shards(optimizer)
    for source in chunks:
        source.engine.memory.check_free(kinds)
    found = dict.fromkeys(kinds, 0)
    for source in chunks:
        more = {MAIN: [(storage, None) for storage in _left_alone(source)]}
        for kind, nbytes in release(source.engine, kinds, more).items():
            found[kind] += nbytes
    if OPTIMIZER not in chosen:
        runtime = chunks[0].engine.runtime
        found[OPTIMIZER] = sum(park_state(one, runtime) for one in shards)
    trim(chunks[0].engine.runtime)
    return found


def return_memory(
    model: Any, optimizer: Any = None, *, only: str | Collection[str] | None = None
) -> None:
    """Takes the memory back that `release_memory` gave back, with what was in it: all of it, or of
    the kinds in `only`. Compute weights are gathered when they are needed. A no-op where
    nothing was released. No collective. ValueError as there."""
    chosen = ALL_KINDS if only is None else _chosen("only", only)
    for source in sources(model):
        take_back(source.engine, [kind for kind in KINDS if kind in chosen])
    for shards in local_shards(optimizer) if OPTIMIZER in chosen else ():
        take_state(shards)


def _left_alone(source: Source) -> list[torch.Tensor]:
    """A tensor over each storage of the parameters that were left alone."""
    found = {}
    for described, value in source.rest:
        for tensor in () if described.is_buffer else memory_of(value):
            found[tensor.untyped_storage()._cdata] = tensor
    return list(found.values())


def release(engine: FsdpEngine, kinds: Sequence[str], more: Storages) -> dict[str, int]:
    """Gives back memory of `kinds` and `more` storages; the bytes of each kind. RuntimeError where
    memory is pinned."""
    engine.memory.check_free(kinds)
    if kinds and not engine.memory.away:
        engine.to_sharded()
        engine.zero_grads()
        engine.gather.invalidate()
        engine.runtime.synchronize()
    return engine.memory.park(kinds, more)


def take_back(engine: FsdpEngine, kinds: Sequence[str]) -> None:
    """Takes it back; what can be gathered is gathered again."""
    engine.memory.take(kinds)
    engine.mark_main_weights_stale()
    engine.gather.invalidate()


def _chosen(argument: str, kinds: str | Collection[str]) -> Sequence[str]:
    given = [kinds] if isinstance(kinds, str) else list(kinds)
    wrong = [kind for kind in given if kind not in ALL_KINDS]
    raise_problems(
        "memory of a wrapped model",
        [f"{argument}={kind!r}: use kinds of {list(ALL_KINDS)}" for kind in wrong],
    )
    return given


def local_shards(optimizer: Any) -> list[LocalShards]:
    """Of an optimizer, of those in Megatron's, or of a list."""
    if optimizer is None:
        return []
    if hasattr(optimizer, "_fsdp_shards"):
        return [optimizer._fsdp_shards]
    chained = getattr(optimizer, "chained_optimizers", None)
    several = list(optimizer) if isinstance(optimizer, list | tuple) else chained
    if several is not None:
        return [shards for one in several for shards in local_shards(one)]
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    if getattr(optimizer, "optimizer", None) is not None:
        return local_shards(optimizer.optimizer)
    raise ValueError(
        f"optimizer: a {type(optimizer).__name__} is not over a wrapped model; give what "
        "fully_shard_optimizer or get_megatron_optimizer returned"
    )


def park_state(shards: LocalShards, runtime: Runtime) -> int:
    """Gives the memory of an optimizer's state back; its bytes."""
    if shards.parked is None:
        shards.parked = HostStash(runtime)
    storages = {OPTIMIZER: [(state, None) for state in shards.state_storages()]}
    return sum(shards.parked.park(storages).values())


def take_state(shards: LocalShards) -> None:
    """Takes it back."""
    if shards.parked is not None:
        shards.parked.take([OPTIMIZER])


def trim(runtime: Runtime) -> None:
    """Returns torch's cached memory to the device."""
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
