"""Whole copies of the weights of one unit after the other, beside those that modules compute with.

    gather stream     copy(0) | copy(1)            | copy(2) ...
    caller's stream             wait(0), uses it ...  wait(1), uses it ...

A copy is ordinary memory of the caller's stream: a tensor that the caller keeps keeps the memory of
its group's copy, and stays what it is. Handing out the weights that modules compute with was turned
down: they have to be given back before the next unit takes their slot, with readers left,
and modules that were not asked would be without their guard meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.comm.communicator import Pair
from ..core.engine.buffer import ShardedBuffer, copy_each
from ..core.engine.engine import FsdpEngine
from ..core.engine.group import ParamGroup
from ..core.engine.params import ParamPair
from ..core.engine.unit import Unit
from ..core.layout.format import Plane
from ..core.runtime.device import COMPUTE, GATHER, storage_bytes
from ..quantized import scales_of

WEIGHT = "weight"
SCALE = "scale"
"""Names of what is copied of a weight that is not quantized, and of a scale that no plane has."""

ROWS = ("rowwise", "rowwise_scales")
"""Planes that forward reads."""

Planes = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Wanted:
    """The weights that are copied, and their dtype.

    dtype: of floating-point weights; None for that of the main weights. quantized: whether
    quantized weights are copied as the bytes and scales of forward.
    """

    group: Callable[[ParamGroup], bool]
    dtype: torch.dtype | None
    quantized: bool

    def planes(self, group: ParamGroup) -> list[tuple[Plane, list[torch.Tensor]]]:
        """Planes of a group's weights that are copied, with what this rank holds of each
        segment."""
        if self.quantized and group.key.quantized:
            shards = [shard for shard in group.weight_shards if shard.plane.name in ROWS]
            return [(shard.plane, shard.segments(group.held)) for shard in shards]
        dtype = cast_to(group.main_dtype, self.dtype)
        return [(Plane(WEIGHT, dtype), _source(group, dtype))]


def cast_to(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype in which a weight in `dtype` is copied where `asked` is, None for any. Integers are
    not cast: bf16 rounds those above 256."""
    if asked is None or not dtype.is_floating_point:
        return dtype
    return asked


def _source(group: ParamGroup, dtype: torch.dtype) -> list[torch.Tensor]:
    """This rank's part of each segment. Of main weights in host memory rather what was made of them
    on the device, in the same dtype, if it is there and not stale."""
    kept = group.main_on_host and group.own_current and dtype == group.key.dtype
    if kept and all(storage_bytes(segment) for segment in group.held_weights):
        return group.held_weights
    return group.main.segments(group.held)


class _GroupCopy:
    """The copy of one group."""

    def __init__(self, group: ParamGroup, wanted: Wanted) -> None:
        self._group = group
        # By plane, of each parameter: the whole, as this rank's model has it; this rank's rows.
        self.items: dict[str, list[torch.Tensor]] = {}
        self._held_items: dict[str, list[torch.Tensor]] = {}
        # This rank's part of each segment of each plane, and what is cast into it.
        self._held: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        # Output and input of gathers over the shard axis, and over the outer axis.
        self.gather_pairs: list[Pair] = []
        self.outer_pairs: list[Pair] = []
        specs = (group.full, group.inner, group.held)
        for plane, source in wanted.planes(group):
            buffer = ShardedBuffer(group.full, specs, group.runtime, plane=plane)
            buffer.forget()
            held = buffer.segments(group.held)
            inner = buffer.segments(group.inner)
            if group.shards_main:
                self.gather_pairs += zip(buffer.segments(group.full), inner, strict=True)
            if group.splits_outer:
                self.outer_pairs += zip(inner, held, strict=True)
            self._held += held
            self._sources += source
            self.items[plane.name] = buffer.params
            self._held_items[plane.name] = buffer.items(group.held)

    def fill(self) -> None:
        """Casts what this rank holds into its place."""
        if WEIGHT not in self.items and self._group.write_planes is not None:  # no shard is kept
            self._group.write_planes(self._held_items)
        else:
            copy_each(self._held, self._sources)


_UnitCopy = tuple[Mapping[int, _GroupCopy], Any]
"""The copies of a unit's groups, by their ids, whose gather was launched, and the event after which
they are there."""


def unit_copies(engine: FsdpEngine, wanted: Wanted) -> Iterator[list[tuple[ParamPair, Planes]]]:
    """The wanted weights of one unit after the other, in unit order: each parameter with its
    tensors by plane, in the shapes that this rank's model has. Collective over each domain.

    The next unit's gather is launched before a unit is handed out. So there are two copies, and
    what the caller keeps of earlier ones.
    """
    engine.bring_up_to_date()
    pairs: dict[int, list[ParamPair]] = {}
    for pair in engine.pairs:
        pairs.setdefault(id(pair.group), []).append(pair)
    units = [unit for unit in engine.units if any(map(wanted.group, unit.groups))]
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
    """Adds a copy of what every rank has beside the planes of a quantized weight."""
    if scales:
        scale = scales[0]  # one number of a vector, with strides that `clone` keeps
        copy = torch.empty(scale.shape, dtype=scale.dtype, device=scale.device)
        planes[SCALE] = copy.copy_(scale)


@torch.no_grad()
def _launch(engine: FsdpEngine, unit: Unit, wanted: Wanted) -> _UnitCopy:
    runtime = engine.runtime
    gather = engine.gather
    groups = list(filter(wanted.group, unit.groups))
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
    for group, copy in copies.items():
        for pair in pairs[group]:
            planes = {name: items[pair.index] for name, items in copy.items.items()}
            if WEIGHT not in planes:
                add_scale(planes, scales_of(pair.unsharded))
            found.append((pair, planes))
    return found
