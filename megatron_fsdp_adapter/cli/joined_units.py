"""Layers that are joined to units (`suggested_communication_unit_size`, or by default): which, and
what is gathered ahead of them. The engine joins modules (`group_layers`); here there are names and
shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from megatron_fsdp_adapter.core.engine.partition import TO
from megatron_fsdp_adapter.diagnostics.memory import GATHERED_WEIGHTS, UNITS_IN_USE
from megatron_fsdp_adapter.sharding.unit_grouping import default_unit_numel

PREFETCHED = torch.bfloat16.itemsize
"""Bytes of an element, by which the size of a joined unit limits what is gathered ahead."""

Params = list[tuple[str, tuple[int, ...], int]]
"""Name, shape and number of shards of each parameter of a unit."""

Row = tuple[str, str, tuple[int, ...], int]
"""The unit in front of these."""

LAYERS = "decoder.layers."


def is_layer(name: str) -> bool:
    """Whether a unit is a transformer layer, or several."""
    return name.startswith(LAYERS)


def layers_of(name: str) -> int:
    """How many a unit is; 1 for any other unit."""
    first, _, last = name.partition(TO)
    return int(last.split(".")[2]) - int(first.split(".")[2]) + 1 if last else 1


def with_layers(listing: Sequence[Row], count: int) -> list[Row]:
    """`listing` with `count` layers like the first one in place of its own."""
    layers = [at for at, row in enumerate(listing) if is_layer(row[0])]
    if not layers:
        return list(listing)
    begin = layers[0]
    first = [row for row in listing if row[0] == listing[begin][0]]
    before, behind = listing[:begin], [row for row in listing[begin:] if not is_layer(row[0])]
    more = [(f"{LAYERS}{number}", *row[1:]) for number in range(count) for row in first]
    return [*before, *more, *behind]


def joined(units: Mapping[str, Params], numel: int | None) -> dict[str, Params]:
    """`units`, of which neighboring layers are one until it has `numel` elements, as the engine
    joins them; None for as many as it joins by default."""
    if numel is None:
        numel = default_unit_numel([_numel(units[unit]) for unit in units if is_layer(unit)])
    found: dict[str, Params] = {}
    before = ""
    for unit, params in units.items():
        if is_layer(before) and is_layer(unit) and _numel(found[before]) < numel:
            params = [*found.pop(before), *params]
            unit = f"{before.split(TO)[0]}{TO}{unit}"
        found[unit] = params
        before = unit
    return found


def _numel(params: Params) -> int:
    return sum(math.prod(shape) for _, shape, _ in params)


def gathered(
    root: Mapping[str, int], units: Sequence[Mapping[str, int]], numel: int
) -> dict[str, int]:
    """Bytes by kind of weights that are gathered at a time where `numel` elements may be gathered
    ahead: beside a unit that computes, as many of the next ones as that lasts, or the two largest
    units if those are more. Empty for 0, where it is one unit."""
    sizes = [unit.get(GATHERED_WEIGHTS, 0) for unit in units]
    if not numel or not any(sizes):
        return {}
    both = (sizes, sizes[::-1])
    most = max(
        order[at] + _ahead(order[at + 1 :], numel) for order in both for at in range(len(order))
    )
    most = max(most, sum(sorted(sizes)[-UNITS_IN_USE:]))
    return {GATHERED_WEIGHTS: root.get(GATHERED_WEIGHTS, 0) + most}


def _ahead(following: Sequence[int], numel: int) -> int:
    total = 0
    for nbytes in following:
        total += nbytes
        if total >= PREFETCHED * numel:
            break
    return total
