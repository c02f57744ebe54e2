"""A wrapped model's memory on the device, given back between training and generation.

    release_memory(model, optimizer)        # another engine generates on the same device
    return_memory(model, optimizer)         # and training goes on, bit for bit

Main weights go to the host. Compute weights that a gather writes again are dropped; so are
gradients, buckets and slots. Quantized weights go to the host: their bytes are not a matter of
main weights alone. Storages are given back and taken again under the tensors, as gathers do it:
whatever holds a view of a buffer keeps it. Addresses change, which only CUDA graphs and
registrations with NCCL know of: those are refused, and left where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..core.engine.buffer import BUFFER_KINDS, COMPUTE_WEIGHTS, GRADIENTS, MAIN_WEIGHTS, SLOTS
from ..core.engine.engine import FsdpEngine
from ..core.problems import raise_problems
from ..core.runtime.device import Runtime
from ..core.runtime.host_stash import HostStash, Kept, Storages
from ..optim.local_shards import LocalShards
from ..quantized import memory_of
from .export_source import Source, sources

OPTIMIZER = "optimizer"
ALL_KINDS = (*BUFFER_KINDS, OPTIMIZER)


def release_memory(
    model: Any, optimizer: Any = None, *, keep: str | Collection[str] = ()
) -> dict[str, int]:
    """Frees device memory of a sharded model and its optimizer, for other users of the device.

    Main weights, parameters that are not sharded, quantized weights and optimizer state move to
    pinned host memory, which is kept for the next call. Compute weights that follow from main
    weights, gradients, and buffers of communication are freed.

    Call it between two steps. Until `return_memory`, the model and the optimizer raise an error
    when they are used. Not collective. A second call frees what the first one has kept. Memory that
    is registered with NCCL (`nccl_ub`, copy engines) stays, and is not counted.

    Examples:
        >>> model = fully_shard_model(nn.Linear(8, 4, bias=False))
        >>> released = release_memory(model)
        >>> released["main_weights"]  # bytes: two rows of eight float32 numbers
        64
        >>> return_memory(model)

    Args:
        model: a model of `FullyShardedDataParallel` or `fully_shard_model`, or a list of chunks.
        optimizer: the sharded optimizer, or Megatron's. None: its state stays.
        keep: one or several kinds of memory that stay: "main_weights" (all that `export_weights`
            needs, unless weights are quantized), "compute_weights", "gradients", "slots",
            "optimizer".

    Returns:
        Freed bytes on this rank, by kind.

    Raises:
        ValueError: an unknown kind, or an optimizer of other parameters.
        RuntimeError: a CUDA graph contains addresses of memory that would be freed.
    """
    chosen = _chosen("keep", keep)
    kinds = [kind for kind in BUFFER_KINDS if kind not in chosen]
    chunks = sources(model)
    shards = local_shards(optimizer)
    for source in chunks:
        _check_free(source.engine, kinds)
    found = dict.fromkeys(kinds, 0)
    for source in chunks:
        more = {MAIN_WEIGHTS: [(storage, None) for storage in _left_alone(source)]}
        for kind, nbytes in release(source.engine, kinds, more).items():
            found[kind] += nbytes
    runtime = chunks[0].engine.runtime
    if OPTIMIZER not in chosen:
        found[OPTIMIZER] = sum(park_state(one, runtime) for one in shards)
    trim(runtime)
    return found


def return_memory(
    model: Any, optimizer: Any = None, *, only: str | Collection[str] | None = None
) -> None:
    """Allocates the memory that `release_memory` has freed, with its contents. Not collective.

    Training goes on bit for bit. Compute weights are gathered when they are needed. Kinds that were
    not released do not change.

    Examples:
        >>> model = fully_shard_model(nn.Linear(8, 4))
        >>> _ = release_memory(model)
        >>> return_memory(model, only="main_weights")  # for an export
        >>> [name for name, _ in export_weights(model)]
        ['weight', 'bias']
        >>> return_memory(model)

    Args:
        model: as for `release_memory`.
        optimizer: as for `release_memory`.
        only: one or several kinds to return. None: all.

    Raises:
        ValueError: an unknown kind, or an optimizer of other parameters.
    """
    chosen = ALL_KINDS if only is None else _chosen("only", only)
    for source in sources(model):
        take_back(source.engine, [kind for kind in BUFFER_KINDS if kind in chosen])
    if OPTIMIZER in chosen:
        for shards in local_shards(optimizer):
            take_state(shards)


def _left_alone(source: Source) -> list[torch.Tensor]:
    """A tensor over each storage of the parameters that were left alone."""
    found = {}
    for described, value in source.rest:
        if described.is_buffer:
            continue
        for tensor in memory_of(value):
            found[tensor.untyped_storage()._cdata] = tensor
    return list(found.values())


def release(engine: FsdpEngine, kinds: Sequence[str], more: Storages) -> dict[str, int]:
    """Gives back memory of `kinds`; returns the bytes of each. Raises RuntimeError if memory is
    pinned. more: further storages by kind; those of other kinds stay."""
    _check_free(engine, kinds)
    if kinds and not engine.away:
        engine.to_sharded()
        engine.zero_grads()
        engine.gather.mark_stale()
        engine.runtime.synchronize()
    own = storages(engine)
    found: dict[str, int] = engine.stash.park(
        {kind: [*own[kind], *more.get(kind, ())] for kind in kinds}
    )
    return found


def take_back(engine: FsdpEngine, kinds: Sequence[str]) -> None:
    """Takes back memory of `kinds`. Compute weights are gathered again before their next use."""
    engine.stash.take(kinds)
    engine.mark_main_weights_stale()
    engine.gather.mark_stale()


def storages(engine: FsdpEngine) -> Storages:
    """Kind -> (a tensor over a storage, the parts of it that keep their contents): None for all of
    it, () for none."""
    found: dict[str, list[tuple[torch.Tensor, Kept]]] = {kind: [] for kind in BUFFER_KINDS}
    found[SLOTS] = [(slot, ()) for slot in _slots(engine)]
    for group in engine.groups:
        for buffer in group.weights.sharded:
            own = buffer.segments(group.shards.held)
            kept = own if group.key.quantized and not group.weights.write_planes else []
            if group.main.is_compute_weight:
                found[MAIN_WEIGHTS] += [(storage, own) for storage in buffer.storages]
            elif not buffer.in_slot:
                found[COMPUTE_WEIGHTS].append((buffer.tensor, kept))
        if not group.main.is_compute_weight and not group.main.is_on_host:
            found[MAIN_WEIGHTS] += [(storage, None) for storage in group.main.buffer.storages]
        if group.key.requires_grad and not group.grads.main.in_slot:
            found[GRADIENTS].append((group.grads.main.tensor, ()))
    return found


def _slots(engine: FsdpEngine) -> list[torch.Tensor]:
    """The memory that slots of units and of collectives have now; memory that is shared, once."""
    if not engine.has_ordinary_slots:
        return []
    found = []
    for group in engine.groups:
        found.append(group.weights.slot.memory)
        if group.key.requires_grad:
            found.append(group.grads.slot.memory)
    for domain in engine.reduce.domains.values():
        if domain.received is not None:
            found.append(domain.received.tensor)
    shared = {id(memory): memory for memory in found if memory is not None}
    return list(shared.values())


def _check_free(engine: FsdpEngine, kinds: Collection[str]) -> None:
    """Raises RuntimeError if there are `kinds` to release and the engine's memory is pinned."""
    pinned_by = engine.pinned_by
    if kinds and pinned_by:
        raise RuntimeError(
            f"release_memory: {pinned_by} has addresses of {', '.join(kinds)}. Switch "
            f"that off, or release the optimizer's state alone, with keep={list(BUFFER_KINDS)}"
        )


def _chosen(argument: str, kinds: str | Collection[str]) -> Sequence[str]:
    # The kinds that the `argument` names. Raises ValueError for unknown ones.
    given = [kinds] if isinstance(kinds, str) else list(kinds)
    wrong = [kind for kind in given if kind not in ALL_KINDS]
    raise_problems(
        "memory of a wrapped model",
        [f"{argument}={kind!r}: unknown. Use kinds of {list(ALL_KINDS)}" for kind in wrong],
    )
    return given


def local_shards(optimizer: Any) -> list[LocalShards]:
    """The local shards of a sharded optimizer, of all those inside one of Megatron's, or of a list
    of either. Raises ValueError for another optimizer."""
    if optimizer is None:
        return []
    if hasattr(optimizer, "_fsdp_shards"):
        return [optimizer._fsdp_shards]
    several = getattr(optimizer, "chained_optimizers", None)
    if isinstance(optimizer, list | tuple):
        several = optimizer
    if several is not None:
        return [shards for one in several for shards in local_shards(one)]
    if getattr(optimizer, "is_stub_optimizer", False):
        return []
    if getattr(optimizer, "optimizer", None) is not None:
        return local_shards(optimizer.optimizer)
    raise ValueError(
        f"optimizer: a {type(optimizer).__name__} is not over a wrapped model. Give what "
        "fully_shard_optimizer or get_megatron_optimizer returned"
    )


def park_state(shards: LocalShards, runtime: Runtime) -> int:
    """Gives back the memory of an optimizer's state; returns its bytes."""
    if shards.parked is None:
        shards.parked = HostStash(runtime, {})
    own = {OPTIMIZER: [(state, None) for state in shards.state_storages()]}
    return sum(shards.parked.park(own).values())


def take_state(shards: LocalShards) -> None:
    """Takes back the memory of `park_state`."""
    if shards.parked is not None:
        shards.parked.take([OPTIMIZER])


def trim(runtime: Runtime) -> None:
    """Returns torch's cached memory to the device."""
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
