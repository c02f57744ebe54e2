"""Whole copies of the weights of one unit after the other, beside those that modules compute with.

    gather stream     copy(0) | copy(1)            | copy(2) ...
    caller's stream             wait(0), uses it ...  wait(1), uses it ...

A copy is ordinary memory of the caller's stream. A tensor that the caller keeps also keeps the
memory of its group's copy, and its values stay. Handing out the weights that modules compute with
was rejected: the next unit takes their slot while the caller may still read them, and modules could
be called without their guard meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.comm.communicator import Pair
from ..core.engine.buffer import copy_each
from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.params import ParamPair
from ..core.engine.unit import Unit
from ..core.layout.format import Plane
from ..core.runtime.device import COMPUTE, GATHER, storage_bytes
from ..quantized import scales_of

WEIGHT = "weight"
SCALE = "scale"
"""Names of two tensors that are copied and are no plane of a format: the values of a weight, and
the scale of a quantized weight that every rank has."""

ROWS = ("rowwise", "rowwise_scales")
"""Planes that forward reads."""

Planes = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Wanted:
    """The weights that are copied, and their dtype.

    is_chosen: True for a group whose weights are copied. dtype: of floating-point weights; None for
    that of the main weights. quantized: quantized weights are copied as the bytes and scales that
    forward reads.
    """

    is_chosen: Callable[[ParamGroup], bool]
    dtype: torch.dtype | None
    quantized: bool

    def planes(self, group: ParamGroup) -> list[tuple[Plane, list[torch.Tensor]]]:
        """(plane, this rank's part of each of its segments) of each plane that is copied of a
        group's weights."""
        if self.quantized and group.key.quantized:
            shards = [shard for shard in group.weights.sharded if shard.plane.name in ROWS]
            return [(shard.plane, shard.segments(group.shards.held)) for shard in shards]
        dtype = cast_to(group.main.dtype, self.dtype)
        return [(Plane(WEIGHT, dtype), _source(group, dtype))]


def cast_to(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype in which a weight of `dtype` is copied if `asked` is wanted (None: no cast).
    Integers are not cast: bf16 rounds those above 256."""
    if asked is None or not dtype.is_floating_point:
        return dtype
    return asked


def _source(group: ParamGroup, dtype: torch.dtype) -> list[torch.Tensor]:
    """This rank's part of each segment of the main weights. Instead of main weights in host memory:
    the compute weights that were made from them on the device, if they have this dtype, have memory
    and are not stale."""
    has_weights = group.main.is_on_host and group.main.is_cast and dtype == group.key.dtype
    if has_weights and all(storage_bytes(segment) for segment in group.weights.held_segments):
        return group.weights.held_segments
    return group.main.buffer.segments(group.shards.held)


class _GroupCopy:
    """The copy of one group's weights. The constructor allocates its memory. It is written by
    `fill`, then the gathers of `outer_pairs`, then those of `gather_pairs`."""

    def __init__(self, group: ParamGroup, wanted: Wanted) -> None:
        self._group = group
        # By plane, a tensor of each parameter: the whole, as this rank's model has it; and the rows
        # that this rank holds.
        self.items: dict[str, list[torch.Tensor]] = {}
        self._held_items: dict[str, list[torch.Tensor]] = {}
        # This rank's part of each segment of each plane, and what is cast into it.
        self._held: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        # Output and input of gathers over the shard axis, and over the outer axis.
        self.gather_pairs: list[Pair] = []
        self.outer_pairs: list[Pair] = []
        shards = group.shards
        for plane, source in wanted.planes(group):
            buffer = shards.buffer(shards.full, plane=plane)
            buffer.forget()
            held = buffer.segments(shards.held)
            inner = buffer.segments(shards.inner)
            if shards.splits_axis:
                self.gather_pairs += zip(buffer.segments(shards.full), inner, strict=True)
            if shards.splits_outer:
                self.outer_pairs += zip(inner, held, strict=True)
            self._held += buffer.parts_like(group.main.buffer, shards.held)
            self._sources += source
            self.items[plane.name] = buffer.params
            self._held_items[plane.name] = buffer.items(shards.held)

    def fill(self) -> None:
        """Writes this rank's part of the copy, cast to its dtype."""
        if WEIGHT not in self.items and self._group.weights.write_planes is not None:
            # Quantized shards are not kept.
            self._group.weights.write_planes(self._held_items)
        else:
            copy_each(self._held, self._sources)


_UnitCopy = tuple[Mapping[int, _GroupCopy], Any]
"""A unit's copies whose gathers were launched, by the id of the group, and the event after which
they are complete."""


def unit_copies(engine: FsdpEngine, wanted: Wanted) -> Iterator[list[tuple[ParamPair, Planes]]]:
    """The wanted weights of one unit after the other, in unit order: pairs of a parameter and its
    tensors by plane, in the shapes that this rank's model has. Collective over each domain.

    The next unit's gather is launched before a unit is handed out. So two copies are in memory, and
    what the caller keeps of earlier ones.
    """
    engine.bring_up_to_date()
    pairs: dict[int, list[ParamPair]] = {}
    for pair in engine.pairs:
        pairs.setdefault(id(pair.group), []).append(pair)
    units = [unit for unit in engine.units if any(map(wanted.is_chosen, unit.groups))]
    launched: deque[_UnitCopy] = deque()
    try:
        for unit in units:
            launched.append(_launch(engine, unit, wanted))
            if len(launched) > 1:
                yield _finish(engine, launched.popleft(), pairs)
        while launched:
            yield _finish(engine, launched.popleft(), pairs)
    finally:
        for _, event in launched:  # what is written to must not go back to the caller's stream
            engine.runtime.wait(COMPUTE, event)


def add_scale(planes: Planes, scales: list[torch.Tensor]) -> None:
    """Adds a copy of the scale that every rank has of a quantized weight, if there is one."""
    if scales:
        scale = scales[0]  # one number of a vector, with strides that `clone` keeps
        copy = torch.empty(scale.shape, dtype=scale.dtype, device=scale.device)
        planes[SCALE] = copy.copy_(scale)


@torch.no_grad()
def _launch(engine: FsdpEngine, unit: Unit, wanted: Wanted) -> _UnitCopy:
    runtime = engine.runtime
    gather = engine.gather
    groups = list(filter(wanted.is_chosen, unit.groups))
    copies = {id(group): _GroupCopy(group, wanted) for group in groups}
    gather.follow_compute()  # main weights, and the memory of the copies, are compute's
    over_outer, over_inner = gather.plan(
        groups,
        lambda group: copies[id(group)].outer_pairs,
        lambda group: copies[id(group)].gather_pairs,
    )
    fills = [copy.fill for copy in copies.values()]
    runtime.submit(GATHER, *fills, *gather.tasks(over_outer), *gather.tasks(over_inner))
    return copies, runtime.record(GATHER)


def _finish(
    engine: FsdpEngine, launched: _UnitCopy, pairs: Mapping[int, list[ParamPair]]
) -> list[tuple[ParamPair, Planes]]:
    copies, event = launched
    engine.runtime.wait(COMPUTE, event)
    found = []
    for group_id, copy in copies.items():
        for pair in pairs[group_id]:
            planes = {name: items[pair.index] for name, items in copy.items.items()}
            if WEIGHT not in planes:
                add_scale(planes, scales_of(pair.unsharded))
            found.append((pair, planes))
    return found
