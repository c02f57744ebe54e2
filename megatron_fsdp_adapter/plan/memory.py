"""The closed formula for the bytes that each rank holds for one group, by kind of buffer.

The engine's books are not consulted: a test sums live storages and compares them with this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
KEPT_SHARD = "shard of weights"
STAGED = "staged optimizer state"
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

PREFETCHED = torch.bfloat16.itemsize
"""Bytes of an element, by which the size of a joined unit limits what is gathered ahead."""


Bytes = dict[str, int]
"""Bytes by kind."""

Moments = tuple[Callable[[ParamSpec], bool], int]
"""The parameters whose moments the optimizer keeps in the main weights' dtype, and the number of
moments."""


@dataclass(frozen=True)
class Precision:
    """Dtypes and places of what is kept beside the compute weights, whose dtype is the group's.

    main: dtype of the weights that the optimizer updates, None for the compute dtype; grad: dtype
    in which gradients accumulate; comm: dtype in which they are reduced; state_bytes: optimizer
    state per element (Adam: two fp32 moments).

    offload: main weights and state are in host memory, and brought to the device unit by unit.
    moments: of parameters that have others, as with Muon and Lion.
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
    row: Strategy,
    rank: int,
    of: Callable[[ParamSpec], bool] = lambda spec: True,
) -> int:
    """Elements, padding excluded, that `rank` updates, of the items that `of` accepts."""
    total = 0
    for index, spec in enumerate(layout.specs):
        if not of(spec):
            continue
        if row.shard_main:
            total += layout.shard_range(index, rank).numel
        else:
            total += spec.numel
    return total


def held_by_rank(layout: GroupLayout) -> list[int]:
    """Elements of items, padding excluded, in every rank's shard, at the cost of the pieces that
    exist."""
    held = [0] * layout.num_shards
    for index in range(len(layout.specs)):
        for rank in layout.holders(index):
            held[rank] += layout.shard_range(index, rank).numel
    return held


def quantized_both_ways(form: WeightFormat, elements: int) -> int:
    """Bytes of weights that are quantized for forward and backward: without columns they are there
    once more, transposed."""
    nbytes = form.nbytes(elements)
    return nbytes if form.has_columns else 2 * nbytes


def group_bytes(
    layout: GroupLayout,
    row: Strategy,
    precision: Precision,
    rank: int,
    whole: bool = False,
) -> Bytes:
    """Bytes on `rank` for a group, by kind; kinds that it does not have are absent.

    Between steps the sum over the `PERSISTENT` kinds is exactly what the rank holds, once the
    optimizer has state. Main weights cost nothing where they are (a slice of) the compute
    weights: those are not sharded, and have the main dtype. A frozen group has weights only, its
    main weights in the compute dtype. Backward derives the transposes of quantized weights without
    columns. whole: of a domain of one rank, of which nothing is sharded; gradients go between steps
    all the same.
    """
    if whole:
        row = STRATEGIES["optim"]
        precision = replace(precision, comm=precision.grad)
    total = layout.total_numel
    shard = layout.shard_numel
    main_numel = shard if row.shard_main else total
    compute = layout.specs[0].dtype
    trained = layout.specs[0].requires_grad
    main = compute
    if trained and precision.main is not None:
        main = precision.main
    weights = GATHERED_WEIGHTS if row.shard_weights else COMPUTE_WEIGHTS
    form = layout.format
    held = {weights: form.nbytes(total)}
    if row.shard_weights and form.keeps_shards(trained):
        held[QUANTIZED_SHARD] = form.nbytes(shard)
    if form.quantized and not form.has_columns:
        held[TRANSPOSES] = form.nbytes(total)
    if row.shard_weights or main != compute or form.quantized:
        held[MAIN_WEIGHTS] = main_numel * main.itemsize
    if not trained:
        return held
    grads = GRADIENT_SHARD if row.shard_grads or whole else MAIN_GRADS
    grad_numel = shard if row.shard_grads else total
    held[grads] = grad_numel * precision.grad.itemsize
    if row.shard_grads or precision.comm != precision.grad:
        held[REDUCE_BUCKET] = total * precision.comm.itemsize
    state = updated_numel(layout, row, rank) * precision.state_bytes
    if precision.moments is not None:
        of, count = precision.moments
        others = updated_numel(layout, row, rank, of)
        state += others * (count * main.itemsize - precision.state_bytes)
    held[OPTIMIZER_STATE] = state
    if precision.offload:
        return _streamed(held, layout, row, main_numel, main, precision.state_bytes)
    return held


def _streamed(
    held: Bytes,
    layout: GroupLayout,
    row: Strategy,
    numel: int,
    main: torch.dtype,
    state_bytes: int,
) -> Bytes:
    """`held` with the optimizer in host memory: main weights too, unless they have the compute
    dtype or quantized weights are made of them. Flat buffers of `numel` elements."""
    left = dict(held)
    del left[OPTIMIZER_STATE]
    moved = numel * state_bytes
    compute = layout.specs[0].dtype
    if main != compute and not layout.format.quantized:
        moved += left.pop(MAIN_WEIGHTS)
        if row.shard_weights:
            left[KEPT_SHARD] = layout.shard_numel * compute.itemsize
    return {**left, STAGED: moved, IN_HOST_MEMORY: moved}


def unit_bytes(
    groups: Iterable[GroupLayout],
    row: Strategy,
    precision: Precision,
    rank: int,
    is_single_rank: Callable[[GroupLayout], bool] = lambda layout: False,
) -> Bytes:
    """Sum of `group_bytes` over the groups of one unit. is_single_rank: whether one is of a domain
    of one rank."""
    totals: Bytes = {}
    for layout in groups:
        _add(totals, group_bytes(layout, row, precision, rank, is_single_rank(layout)))
    return totals


def model_bytes(root: Bytes, units: Sequence[Bytes]) -> Bytes:
    """Most bytes at one time by kind, from the `unit_bytes` of the root unit and all others.

    Of the kinds that a unit holds only while in use, the two largest units exist at once; of what
    is updated, neighbors, from the root on. The root unit's gathered weights stay beside them
    through forward and backward. Transposes go with the unit's backward: there are those of one
    unit.
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


def with_slots(
    held: Bytes,
    kinds: Sequence[str],
    units: Sequence[Sequence[GroupLayout]],
    strategy: Strategy,
    precision: Precision,
    rows: Sequence[Strategy],
    *,
    weight_slots: bool,
    bucket_slots: bool,
    reduce_scatter: Reduce,
) -> Bytes:
    """`model_bytes` with slots in place of the transient buffers that are in them, and with what a
    reduction from slots needs.

    kinds, units: class of each unit's module, and layouts of its groups but those of domains of one
    rank, in order; rows: each unit's own strategy; the switches are those of `EngineConfig`.
    """
    comm = precision.comm
    # Of each unit, bytes in a slot; None where it takes none.
    gathered: list[int | None] = []
    reduced: list[int | None] = []
    # Of the largest bucket in a slot, and of the largest beside them.
    received = 0
    received_beside = 0
    for row, unit in zip(rows, units, strict=True):
        gathered.append(weights_in_slot(unit) if row.shard_weights and unit else None)
        narrow = reduce_scatter.into_shards and row.shard_grads
        largest = max((bucket_bytes(one, comm, narrow) for one in unit), default=0)
        if unit and (row.shard_grads or comm != precision.grad):
            reduced.append(buckets_in_slot(unit, comm, narrow))
            received = max(received, largest)
        else:
            reduced.append(None)
            received_beside = max(received_beside, largest)
    totals = dict(held)
    if weight_slots and totals.pop(GATHERED_WEIGHTS, None) is not None:
        totals[WEIGHT_SLOTS] = sum(plan_slots(kinds, gathered)[1])
    if not strategy.shard_grads:
        return totals
    if bucket_slots and totals.pop(REDUCE_BUCKET, None) is not None:
        totals[BUCKET_SLOTS] = sum(plan_slots(kinds, reduced)[1])
    if reduce_scatter.fixed:
        totals[RECEIVED_PIECES] = received
        if received_beside:  # in memory that comes and goes
            totals[REDUCE_BUCKET] = totals.get(REDUCE_BUCKET, 0) + received_beside
    return totals


Placed = tuple[GroupLayout, int, bool]
"""A group's layout, this rank's number among its shards, and whether nothing of it is sharded, as
its domain has one rank."""


def held_bytes(
    units: Sequence[Sequence[Placed]],
    kinds: Sequence[str],
    rows: Sequence[Strategy],
    strategy: Strategy,
    precision: Precision,
    ahead: int = 0,
    **slots: Any,
) -> Bytes:
    """Most bytes of each kind at one time, of all units, the root's last. kinds: class of each
    unit's module; rows: each unit's own strategy; ahead: elements that may be gathered ahead of the
    unit that computes, if that is more than the next unit; slots: as for `with_slots`."""
    known: dict[tuple[int, int], Bytes] = {}
    every = []
    shared = []
    for groups, row in zip(units, rows, strict=True):
        of_unit = (id(groups), id(row))
        if of_unit not in known:
            known[of_unit] = {}
            for layout, rank, whole in groups:
                _add(known[of_unit], group_bytes(layout, row, precision, rank, whole))
        every.append(known[of_unit])
        shared.append([layout for layout, _, whole in groups if not whole])
    *others, root = every
    totals = model_bytes(root, others) | _gathered_ahead(root, others, ahead)
    return with_slots(totals, kinds, shared, strategy, precision, rows, **slots)


def _gathered_ahead(root: Bytes, units: Sequence[Bytes], numel: int) -> Bytes:
    """Bytes by kind of weights that are gathered at a time where `numel` elements may be gathered
    ahead: beside a unit that computes, as many of the next ones as that lasts, or the two largest
    units if those are more. Empty for 0, where it is one unit."""
    sizes = [unit.get(GATHERED_WEIGHTS, 0) for unit in units]
    if not numel or not any(sizes):
        return {}
    most = _largest(GATHERED_WEIGHTS, units)
    for order in (sizes, sizes[::-1]):  # of forward, of backward
        for at, size in enumerate(order):
            most = max(most, size + _until(order[at + 1 :], PREFETCHED * numel))
    return {GATHERED_WEIGHTS: root.get(GATHERED_WEIGHTS, 0) + most}


def _until(following: Sequence[int], limit: int) -> int:
    """The sum of as many as first reach the limit."""
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
    """Most bytes on the device at one time. Units are updated between backward and the end of the
    next forward, so beside gathered weights, and not beside what a backward alone needs."""
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
    for kind, count in part.items():
        totals[kind] = totals.get(kind, 0) + count
