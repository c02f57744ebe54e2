"""The closed formula for the bytes that a rank holds, by kind of buffer: for a group, for a unit,
for a model.

It reads nothing of an engine: a test sums live storages and compares them with this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..core.comm.communicator import Reduce
from ..core.config import STRATEGIES, Strategy
from ..core.engine.buffer import bucket_bytes, buckets_in_slot, plan_slots, weights_in_slot
from ..core.engine.reduce import MAX_BUCKETS
from ..core.layout.format import WeightFormat
from ..core.layout.group import GroupLayout, ParamSpec

COMPUTE_WEIGHTS = "compute weights"
QUANTIZED_SHARD = "quantized shard"
MAIN_WEIGHTS = "main weights"
MAIN_GRADS = "main gradients"
OPTIMIZER_STATE = "optimizer state"
GRADIENT_SHARD = "gradient shard"
GATHERED_WEIGHTS = "gathered weights"
REDUCE_BUCKET = "reduce bucket"
WEIGHT_SLOTS = "weight slots"
BUCKET_SLOTS = "bucket slots"
RECEIVED_PIECES = "received pieces"
TRANSPOSES = "transposes"
QUANTIZED_COPIES = "quantized copies of weights"
KEPT_SHARD = "shard of compute weights"
STAGED = "optimizer state of two units"
IN_HOST_MEMORY = "offloaded optimizer"

PERSISTENT = "persistent"
BACKWARD_TO_STEP = "backward to optimizer step"
UNIT_IN_USE = "while the unit is in use"
FORWARD_TO_BACKWARD = "forward to backward"
IN_STEP = "while the unit is updated"
ON_HOST = "in host memory"

LIFE: Mapping[str, str] = {
    COMPUTE_WEIGHTS: PERSISTENT,
    QUANTIZED_SHARD: PERSISTENT,
    MAIN_WEIGHTS: PERSISTENT,
    MAIN_GRADS: PERSISTENT,
    OPTIMIZER_STATE: PERSISTENT,
    GRADIENT_SHARD: BACKWARD_TO_STEP,
    GATHERED_WEIGHTS: UNIT_IN_USE,
    REDUCE_BUCKET: UNIT_IN_USE,
    WEIGHT_SLOTS: PERSISTENT,
    BUCKET_SLOTS: PERSISTENT,
    RECEIVED_PIECES: PERSISTENT,
    TRANSPOSES: UNIT_IN_USE,
    QUANTIZED_COPIES: FORWARD_TO_BACKWARD,
    KEPT_SHARD: PERSISTENT,
    STAGED: IN_STEP,
    IN_HOST_MEMORY: ON_HOST,
}
"""Kind -> its lifetime. Between steps, gradients zeroed, only the persistent kinds exist."""

UNITS_GATHERED = 2
"""Units that have gathered weights at once: one that computes, and its neighbor."""

PREFETCHED_ITEMSIZE = torch.bfloat16.itemsize
"""Bytes of an element in the limit of what is gathered ahead, which is a number of elements."""


Bytes = dict[str, int]
"""Bytes by kind."""

Moments = tuple[Callable[[ParamSpec], bool], int]
"""The parameters whose moments the optimizer keeps in the main weights' dtype, and the number of
moments."""


@dataclass(frozen=True)
class Precision:
    """Dtypes and places of what is kept beside the compute weights, whose dtype is the group's.

    Attributes:
        main: dtype of the weights that the optimizer updates; None for the compute dtype.
        grad: dtype in which gradients accumulate.
        comm: dtype in which gradients are reduced.
        state_bytes: optimizer state per element (Adam: two fp32 moments).
        offload: main weights and state are in host memory, and come to the device unit by unit.
        moments: which parameters have other moments, as with Muon and Lion; None if none have.
    """

    main: torch.dtype | None = torch.float32
    grad: torch.dtype = torch.float32
    comm: torch.dtype = torch.float32
    state_bytes: int = 8
    offload: bool = False
    moments: Moments | None = None

    def __post_init__(self) -> None:
        if self.moments is not None and self.offload:
            raise ValueError(
                "optimizer='muon' or 'lion' with its state in host memory: only the state of "
                "'adam' can be offloaded. Leave one of the two out"
            )


def updated_numel(
    layout: GroupLayout,
    is_sharded: bool,
    rank: int,
    counts: Callable[[ParamSpec], bool] = lambda spec: True,
) -> int:
    """Elements, padding excluded, that `rank` updates, of the parameters that `counts` accepts.
    is_sharded: whether main weights are."""
    total = 0
    for index, spec in enumerate(layout.specs):
        if not counts(spec):
            continue
        if is_sharded:
            total += layout.shard_range(index, rank).numel
        else:
            total += spec.numel
    return total


def held_by_rank(layout: GroupLayout) -> list[int]:
    """Elements, padding excluded, in the shard of each rank. Visits only pieces that exist, not
    each parameter for each rank."""
    held = [0] * layout.num_shards
    for index in range(len(layout.specs)):
        for rank in layout.holders(index):
            held[rank] += layout.shard_range(index, rank).numel
    return held


def quantized_both_ways(form: WeightFormat, elements: int) -> int:
    """Bytes of weights that are quantized for forward and backward. A format without columns needs
    a transposed copy for backward."""
    nbytes = form.nbytes(elements)
    return nbytes if form.has_columns else 2 * nbytes


def group_bytes(
    layout: GroupLayout,
    row: Strategy,
    precision: Precision,
    rank: int,
    whole: bool = False,
    parts: int = 1,
) -> Bytes:
    """Bytes on `rank` for a group, by kind; kinds that it does not have are absent.

    Between steps the sum over the `PERSISTENT` kinds is exactly what the rank holds, once the
    optimizer has state.

    - Main weights cost nothing if they are the compute weights or a slice of them. They are if
      compute weights are not sharded, not quantized, and have the main dtype.
    - A frozen group has weights only, its main weights in the compute dtype.
    - Backward derives transposes of quantized weights that have no columns.

    whole: the group's domain has one rank, so that nothing of it is sharded. Its gradients are
        freed between steps even so.
    parts: the outer axis splits each shard into so many, which are the shards of `layout`. If the
        row shards no main weights, `layout` has these parts of the whole.
    """
    if whole:
        row = STRATEGIES["optim"]
        precision = replace(precision, comm=precision.grad)
    total = layout.total_numel
    shard = layout.shard_numel
    is_sharded = row.shard_main or parts > 1
    main_numel = shard if is_sharded else total
    # A shard over the shard axis alone.
    inner = shard * parts if row.shard_main else total
    compute = layout.specs[0].dtype
    trained = layout.specs[0].requires_grad
    main = compute
    if trained and precision.main is not None:
        main = precision.main
    weights = GATHERED_WEIGHTS if row.shard_weights else COMPUTE_WEIGHTS
    form = layout.format
    held = {weights: form.nbytes(total)}
    if row.shard_weights and (parts > 1 or form.keeps_shards(trained)):
        held[QUANTIZED_SHARD if form.quantized else KEPT_SHARD] = form.nbytes(inner)
    if form.quantized and not form.has_columns:
        held[TRANSPOSES] = form.nbytes(total)
    if row.shard_weights or main != compute or form.quantized:
        held[MAIN_WEIGHTS] = main_numel * main.itemsize
    if not trained:
        return held
    grads = GRADIENT_SHARD if row.shard_grads or whole else MAIN_GRADS
    grad_numel = inner if row.shard_grads else total
    held[grads] = grad_numel * precision.grad.itemsize
    if row.shard_grads or precision.comm != precision.grad:
        held[REDUCE_BUCKET] = total * precision.comm.itemsize
    state = updated_numel(layout, is_sharded, rank) * precision.state_bytes
    if precision.moments is not None:
        has_others, count = precision.moments
        others = updated_numel(layout, is_sharded, rank, has_others)
        state += others * (count * main.itemsize - precision.state_bytes)
    held[OPTIMIZER_STATE] = state
    if precision.offload:
        kept = inner if row.shard_weights else 0
        return _streamed(held, layout, kept, main_numel, main, precision.state_bytes)
    return held


def _streamed(
    held: Bytes,
    layout: GroupLayout,
    kept: int,
    numel: int,
    main: torch.dtype,
    state_bytes: int,
) -> Bytes:
    """`held` with the optimizer state in host memory, in flat buffers of `numel` elements. Main
    weights go there too, unless they have the compute dtype or quantized weights are made of
    them. A shard of `kept` elements of the compute weights stays then."""
    left = dict(held)
    del left[OPTIMIZER_STATE]
    moved = numel * state_bytes
    compute = layout.specs[0].dtype
    if main != compute and not layout.format.quantized:
        moved += left.pop(MAIN_WEIGHTS)
        if kept:
            left[KEPT_SHARD] = kept * compute.itemsize
    return {**left, STAGED: moved, IN_HOST_MEMORY: moved}


def unit_bytes(
    groups: Iterable[GroupLayout],
    row: Strategy,
    precision: Precision,
    rank: int,
    is_single_rank: Callable[[GroupLayout], bool] = lambda layout: False,
    parts: int = 1,
) -> Bytes:
    """Sum of `group_bytes` over the groups of one unit. is_single_rank: whether the domain of a
    group has one rank."""
    totals: Bytes = {}
    for layout in groups:
        _add(totals, group_bytes(layout, row, precision, rank, is_single_rank(layout), parts))
    return totals


def model_bytes(root: Bytes, units: Sequence[Bytes]) -> Bytes:
    """Most bytes at one time by kind, from the `unit_bytes` of the root unit and all others.

    Kinds that a unit holds only for a time exist for few units at once:

    - gathered weights: for the two largest units, and for the root through the whole pass;
    - reduce buckets: for the `MAX_BUCKETS` largest of all units, with the root;
    - optimizer state that is in host memory otherwise: for two neighbors in the order of updates,
      which starts at the root;
    - transposes: for one unit, as they go with its backward.
    """
    every = [root, *units]
    totals: Bytes = {}
    for unit in every:
        _add(totals, unit)
    staged = [unit.get(STAGED, 0) for unit in every]
    neighbors = zip(staged, [*staged[1:], 0], strict=True)
    at_once = {
        STAGED: max(one + following for one, following in neighbors),
        GATHERED_WEIGHTS: root.get(GATHERED_WEIGHTS, 0) + _largest(GATHERED_WEIGHTS, units),
        REDUCE_BUCKET: _largest(REDUCE_BUCKET, every),
        TRANSPOSES: max(unit.get(TRANSPOSES, 0) for unit in every),
    }
    for kind, count in at_once.items():
        if totals.pop(kind, None) is not None:
            totals[kind] = count
    return totals


class PlacedGroup(NamedTuple):
    """A group of a unit, as one rank has it."""

    # Of its parameters.
    layout: GroupLayout
    # This rank's number among its shards.
    rank: int
    # Whether nothing of it is sharded, as its domain has one rank.
    whole: bool
    # Its own strategy, and that of its domain, of which the unit may keep more.
    row: Strategy
    of_domain: Strategy
    # Into how many parts the outer axis splits each shard.
    parts: int = 1


def with_slots(
    held: Bytes,
    kinds: Sequence[str],
    units: Sequence[Sequence[PlacedGroup]],
    precision: Precision,
    *,
    weight_slots: bool,
    bucket_slots: bool,
    reduce_scatter: Reduce,
) -> Bytes:
    """`held`, from `model_bytes`, with slots in place of the transient buffers that are in them,
    and with what a reduction from slots needs.

    Args:
        kinds: class of each unit's module.
        units: each unit's groups.
        weight_slots, bucket_slots, reduce_scatter: the fields of `EngineConfig`.
    """
    comm = precision.comm
    # The bytes of each unit in a slot; None where it takes none.
    gathered: list[int | None] = []
    reduced: list[int | None] = []
    # Bytes of the largest bucket in a slot, and of the largest one outside of slots.
    received = 0
    received_beside = 0
    # Bytes of each unit's buckets that are never in slots.
    transient: list[int] = []
    for unit in units:
        sharded = [one for one in unit if not one.whole]
        in_slot = [one.layout for one in sharded if one.row.shard_weights]
        gathered.append(weights_in_slot(in_slot) if in_slot else None)
        sizes = []
        transient.append(0)
        for one in sharded:
            narrow = reduce_scatter.finishes and one.row.shard_grads
            size = bucket_bytes(one.layout, comm, narrow)
            has_bucket = one.row.shard_grads or comm != precision.grad
            if not one.of_domain.shard_grads:
                transient[-1] += size if has_bucket else 0
            elif has_bucket:
                sizes.append(buckets_in_slot([one.layout], comm, narrow))
                received = max(received, size)
            else:
                received_beside = max(received_beside, size)
        reduced.append(sum(sizes) if sizes else None)
    totals = dict(held)
    if weight_slots and totals.pop(GATHERED_WEIGHTS, None) is not None:
        totals[WEIGHT_SLOTS] = sum(plan_slots(kinds, gathered)[1])
    if not any(one.of_domain.shard_grads for unit in units for one in unit):
        return totals
    if bucket_slots and totals.pop(REDUCE_BUCKET, None) is not None:
        totals[BUCKET_SLOTS] = sum(plan_slots(kinds, reduced)[1])
        if any(transient):
            totals[REDUCE_BUCKET] = sum(sorted(transient)[-MAX_BUCKETS:])
    if reduce_scatter.fixed:
        totals[RECEIVED_PIECES] = received
        if received_beside:  # its pieces are in transient memory
            totals[REDUCE_BUCKET] = totals.get(REDUCE_BUCKET, 0) + received_beside
    return totals


def held_bytes(
    units: Sequence[Sequence[PlacedGroup]],
    kinds: Sequence[str],
    precision: Precision,
    ahead: int = 0,
    **slots: Any,
) -> Bytes:
    """Most bytes of each kind at one time, of all `units`, of which the root is the last.

    Args:
        kinds: class of each unit's module.
        ahead: elements that may be gathered ahead of the unit that computes; 0: the next unit.
        slots: the keyword arguments of `with_slots`.
    """
    # By list of groups: units that share it are computed once.
    known: dict[int, Bytes] = {}
    every = []
    for groups in units:
        if id(groups) not in known:
            found: Bytes = {}
            for one in groups:
                held = group_bytes(one.layout, one.row, precision, one.rank, one.whole, one.parts)
                _add(found, held)
            known[id(groups)] = found
        every.append(known[id(groups)])
    *others, root = every
    totals = model_bytes(root, others) | _gathered_ahead(root, others, ahead)
    return with_slots(totals, kinds, units, precision, **slots)


def _gathered_ahead(root: Bytes, units: Sequence[Bytes], numel: int) -> Bytes:
    """Bytes by kind of the weights that are gathered at one time, if `numel` elements may be
    gathered ahead. Empty for 0: `model_bytes` has them then.

    Beside a unit that computes there are the next ones, until these reach the limit; or the two
    largest units, if those are more.
    """
    sizes = [unit.get(GATHERED_WEIGHTS, 0) for unit in units]
    if not numel or not any(sizes):
        return {}
    limit = PREFETCHED_ITEMSIZE * numel
    most = _largest(GATHERED_WEIGHTS, units)
    for order in (sizes, sizes[::-1]):  # of forward, of backward
        for number, size in enumerate(order):
            most = max(most, size + _sum_until(order[number + 1 :], limit))
    return {GATHERED_WEIGHTS: root.get(GATHERED_WEIGHTS, 0) + most}


def _sum_until(following: Sequence[int], limit: int) -> int:
    """The sum of `following` up to and including the one that reaches `limit`."""
    total = 0
    for size in following:
        if total >= limit:
            break
        total += size
    return total


def bytes_between_steps(held: Bytes) -> int:
    """Bytes of the kinds that exist between two steps, gradients zeroed."""
    return sum(count for kind, count in held.items() if LIFE[kind] == PERSISTENT)


def most_bytes(held: Bytes) -> int:
    """Most bytes on the device at one time. Units are updated between a backward and the end of the
    next forward: then gathered weights exist, but not what only a backward needs."""
    lives = dict.fromkeys(LIFE.values(), 0)
    for kind, count in held.items():
        lives[LIFE[kind]] += count
    passes = lives[UNIT_IN_USE] + lives[FORWARD_TO_BACKWARD]
    updates = lives[IN_STEP] + held.get(GATHERED_WEIGHTS, 0)
    return lives[PERSISTENT] + lives[BACKWARD_TO_STEP] + max(passes, updates)


def _largest(kind: str, units: Iterable[Bytes]) -> int:
    """Bytes of a kind in the largest of the units that have it at once."""
    count = MAX_BUCKETS if kind == REDUCE_BUCKET else UNITS_GATHERED
    sizes = sorted(unit.get(kind, 0) for unit in units)
    return sum(sizes[-count:])


def _add(totals: Bytes, part: Bytes) -> None:
    """Adds `part` to `totals`, in place."""
    for kind, count in part.items():
        totals[kind] = totals.get(kind, 0) + count
