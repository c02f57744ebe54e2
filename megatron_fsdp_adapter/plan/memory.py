"""The closed formula for the bytes that each rank holds for one group, by kind of buffer.

The engine's books are not consulted: a test sums live storages and compares them with this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from ..core.comm.communicator import Reduce
from ..core.config import STRATEGIES, Strategy
from ..core.engine.buffer import bucket_bytes, buckets_in_slot, plan_slots, weights_in_slot
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

UNITS_IN_USE = 2
"""One unit computes while its neighbor is gathered or reduced."""

PREFETCHED = torch.bfloat16.itemsize
"""Bytes of an element, by which the size of a joined unit limits what is gathered ahead."""


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
    layout: GroupLayout, row: Strategy, rank: int,
    of: Callable[[ParamSpec], bool] = lambda spec: True,
) -> int:
    """Elements, padding excluded, that `rank` updates, of the items that `of` accepts."""
    return sum(
        layout.shard_range(index, rank).numel if row.shard_main else spec.numel
        for index, spec in enumerate(layout.specs) if of(spec)
    )


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
    return form.nbytes(elements) * (1 if form.has_columns else 2)


def group_bytes(
    layout: GroupLayout, row: Strategy, precision: Precision, rank: int,
    whole: bool = False,
) -> dict[str, int]:
    """Bytes on `rank` for a group, by kind; kinds that it does not have are absent.

    Between steps the sum over the `PERSISTENT` kinds is exactly what the rank holds, once the
    optimizer has state. Main weights cost nothing where they are (a slice of) the compute
    weights: those are not sharded, and have the main dtype. A frozen group has weights only, its
    main weights in the compute dtype. Backward derives the transposes of quantized weights without
    columns. whole: of a domain of one rank, of which nothing is sharded; gradients go between steps
    all the same.
    """
    if whole:
        row, precision = STRATEGIES["optim"], replace(precision, comm=precision.grad)
    total, shard = layout.total_numel, layout.shard_numel
    compute, trained = layout.specs[0].dtype, layout.specs[0].requires_grad
    main = precision.main if trained and precision.main is not None else compute
    weights = GATHERED_WEIGHTS if row.shard_weights else COMPUTE_WEIGHTS
    form = layout.format
    held = {weights: form.nbytes(total)}
    if row.shard_weights and form.keeps_shards(trained):
        held[QUANTIZED_SHARD] = form.nbytes(shard)
    if form.quantized and not form.has_columns:
        held[TRANSPOSES] = form.nbytes(total)
    if row.shard_weights or main != compute or form.quantized:
        held[MAIN_WEIGHTS] = (shard if row.shard_main else total) * main.itemsize
    if not trained:
        return held
    held[GRADIENT_SHARD if row.shard_grads or whole else MAIN_GRADS] = precision.grad.itemsize * (
        shard if row.shard_grads else total
    )
    if row.shard_grads or precision.comm != precision.grad:
        held[REDUCE_BUCKET] = total * precision.comm.itemsize
    state = updated_numel(layout, row, rank) * precision.state_bytes
    if precision.moments is not None:
        of, count = precision.moments
        others = updated_numel(layout, row, rank, of)
        state += others * (count * main.itemsize - precision.state_bytes)
    held[OPTIMIZER_STATE] = state
    if precision.offload:
        numel = shard if row.shard_main else total
        return _streamed(held, layout, row, numel, main, precision.state_bytes)
    return held


def _streamed(
    held: Mapping[str, int], layout: GroupLayout, row: Strategy, numel: int, main: torch.dtype,
    state_bytes: int,
) -> dict[str, int]:
    """`held` with the optimizer in host memory: main weights too, unless they have the compute
    dtype or quantized weights are made of them. Flat buffers of `numel` elements."""
    left, moved, compute = dict(held), numel * state_bytes, layout.specs[0].dtype
    del left[OPTIMIZER_STATE]
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
) -> dict[str, int]:
    """Sum of `group_bytes` over the groups of one unit. is_single_rank: whether one is of a domain
    of one rank."""
    return _sum(
        group_bytes(layout, row, precision, rank, is_single_rank(layout)) for layout in groups
    )


def model_bytes(root: Mapping[str, int], units: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Most bytes at one time by kind, from the `unit_bytes` of the root unit and all others.

    Of the kinds that a unit holds only while in use, the two largest units exist at once; of what
    is updated, neighbors, from the root on. The root unit's gathered weights stay beside them
    through forward and backward. Transposes go with the unit's backward: there are those of one
    unit.
    """
    every = [root, *units]
    passing = (UNIT_IN_USE, IN_STEP)
    totals = _sum({k: v for k, v in unit.items() if LIFE[k] not in passing} for unit in every)
    staged = [unit.get(STAGED, 0) for unit in every]
    at_once = {
        STAGED: max(map(sum, zip(staged, [*staged[1:], 0], strict=True))),
        GATHERED_WEIGHTS: root.get(GATHERED_WEIGHTS, 0) + _largest(GATHERED_WEIGHTS, units),
        REDUCE_BUCKET: _largest(REDUCE_BUCKET, every),
        TRANSPOSES: max(unit.get(TRANSPOSES, 0) for unit in every),
    }
    kinds = {kind for unit in every for kind in unit}
    return totals | {kind: count for kind, count in at_once.items() if kind in kinds}


def with_slots(
    held: Mapping[str, int],
    kinds: Sequence[str],
    units: Sequence[Sequence[GroupLayout]],
    strategy: Strategy,
    precision: Precision,
    rows: Sequence[Strategy],
    *,
    weight_slots: bool,
    bucket_slots: bool,
    reduce_scatter: Reduce,
) -> dict[str, int]:
    """`model_bytes` with slots in place of the transient buffers that are in them, and with what a
    reduction from slots needs.

    kinds, units: class of each unit's module, and layouts of its groups but those of domains of one
    rank, in order; rows: each unit's own strategy; the switches are those of `EngineConfig`.
    """
    comm = precision.comm
    of_units = list(zip(rows, units, strict=True))
    collected = [(row.shard_grads or comm != precision.grad) and bool(u) for row, u in of_units]
    narrows = [reduce_scatter.into_shards and row.shard_grads for row in rows]
    totals = dict(held)
    if weight_slots and totals.pop(GATHERED_WEIGHTS, None) is not None:
        gathered = [
            weights_in_slot(unit) if row.shard_weights and unit else None for row, unit in of_units
        ]
        totals[WEIGHT_SLOTS] = sum(plan_slots(kinds, gathered)[1])
    if bucket_slots and strategy.shard_grads and totals.pop(REDUCE_BUCKET, None) is not None:
        reduced = [
            buckets_in_slot(unit, comm, narrow) if has else None
            for unit, narrow, has in zip(units, narrows, collected, strict=True)
        ]
        totals[BUCKET_SLOTS] = sum(plan_slots(kinds, reduced)[1])
    if reduce_scatter.fixed and strategy.shard_grads:
        sizes = [
            (max((bucket_bytes(one, comm, narrow) for one in unit), default=0), has)
            for unit, narrow, has in zip(units, narrows, collected, strict=True)
        ]
        in_slots, kept = (
            max((size for size, has in sizes if has is there), default=0) for there in (True, False)
        )
        totals[RECEIVED_PIECES] = in_slots
        if kept:  # received in memory that comes and goes
            totals[REDUCE_BUCKET] = totals.get(REDUCE_BUCKET, 0) + kept
    return totals


Placed = tuple[GroupLayout, int, bool]
"""A group's layout, this rank's number among its shards, and whether nothing of it is sharded, as
its domain has one rank."""


def held_bytes(
    units: Sequence[Sequence[Placed]], kinds: Sequence[str], rows: Sequence[Strategy],
    strategy: Strategy, precision: Precision, ahead: int = 0, **slots: Any,
) -> dict[str, int]:
    """Most bytes of each kind at one time, of all units, the root's last. kinds: class of each
    unit's module; rows: each unit's own strategy; ahead: elements that may be gathered ahead of the
    unit that computes, if that is more than the next unit; slots: as for `with_slots`."""
    known: dict[tuple[int, int], dict[str, int]] = {}
    for groups, row in zip(units, rows, strict=True):
        if (id(groups), id(row)) not in known:
            known[id(groups), id(row)] = _sum(
                group_bytes(layout, row, precision, rank, whole) for layout, rank, whole in groups
            )
    *others, root = [known[id(groups), id(row)] for groups, row in zip(units, rows, strict=True)]
    shared = [[layout for layout, _, whole in groups if not whole] for groups in units]
    totals = model_bytes(root, others) | _gathered_ahead(root, others, ahead)
    return with_slots(totals, kinds, shared, strategy, precision, rows, **slots)


def _gathered_ahead(
    root: Mapping[str, int], units: Sequence[Mapping[str, int]], numel: int
) -> dict[str, int]:
    """Bytes by kind of weights that are gathered at a time where `numel` elements may be gathered
    ahead: beside a unit that computes, as many of the next ones as that lasts, or the two largest
    units if those are more. Empty for 0, where it is one unit."""
    sizes = [unit.get(GATHERED_WEIGHTS, 0) for unit in units]
    if not numel or not any(sizes):
        return {}
    most = max(
        order[at] + _until(order[at + 1 :], PREFETCHED * numel)
        for order in (sizes, sizes[::-1]) for at in range(len(order))
    )
    most = max(most, _largest(GATHERED_WEIGHTS, units))
    return {GATHERED_WEIGHTS: root.get(GATHERED_WEIGHTS, 0) + most}


def _until(following: Sequence[int], limit: int) -> int:
    """The sum of as many as first reach the limit."""
    sums = list(accumulate(following, initial=0))
    return next((total for total in sums if total >= limit), sums[-1])


def bytes_between_steps(held: Mapping[str, int]) -> int:
    """Bytes of the kinds that exist between two steps, gradients zeroed."""
    return sum(count for kind, count in held.items() if LIFE[kind] == PERSISTENT)


def most_bytes(held: Mapping[str, int]) -> int:
    """Most bytes on the device at one time. Units are updated between backward and the end of the
    next forward, so beside gathered weights, and not beside what a backward alone needs."""
    lives = {
        life: sum(count for kind, count in held.items() if LIFE[kind] == life)
        for life in set(LIFE.values())
    }
    passes = lives[UNIT_IN_USE] + lives[FORWARD_TO_BACKWARD]
    updates = lives[IN_STEP] + held.get(GATHERED_WEIGHTS, 0)
    return lives[PERSISTENT] + lives[BACKWARD_TO_STEP] + max(passes, updates)


def _largest(kind: str, units: Iterable[Mapping[str, int]]) -> int:
    return sum(sorted(unit.get(kind, 0) for unit in units)[-UNITS_IN_USE:])


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for part in parts:
        for kind, count in part.items():
            totals[kind] = totals.get(kind, 0) + count
    return totals
