"""Layers that `suggested_communication_unit_size` joins to units: which, and what is gathered ahead
of them. The engine joins modules (`join_units`); here there are names and shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import torch

from megatron_fsdp_adapter.core.engine.partition import TO
from megatron_fsdp_adapter.diagnostics.memory import GATHERED_WEIGHTS, UNITS_IN_USE
from megatron_fsdp_adapter.megatron.options.ddp_options import UNIT_NUMEL

from . import graph_pools

PREFETCHED = torch.bfloat16.itemsize
"""Bytes of an element, by which the size of a joined unit limits what is gathered ahead."""

Params = list[tuple[str, tuple[int, ...], int]]
"""Name, shape and number of shards of each parameter of a unit."""


def is_layer(name: str) -> bool:
    """Whether a unit is a transformer layer, or several."""
    return name.startswith("decoder.layers.")


def layers_of(name: str) -> int:
    """How many a unit is; 1 for any other unit."""
    first, _, last = name.partition(TO)
    return int(last.split(".")[2]) - int(first.split(".")[2]) + 1 if last else 1


def with_layers(units: Sequence[str], count: int) -> list[str]:
    """Units of layers, in turn, until they are `count` layers or more."""
    chosen, found, names = list[str](), 0, cycle(units)
    while found < count:
        chosen.append(next(names))
        found += layers_of(chosen[-1])
    return chosen


def joined(units: Mapping[str, Params], numel: int) -> dict[str, Params]:
    """`units`, of which neighbouring layers are one until it has `numel` elements, as the engine
    joins them."""
    found: dict[str, Params] = {}
    before = ""
    for unit, params in units.items():
        size = sum(math.prod(shape) for _, shape, _ in found.get(before, ()))
        if is_layer(before) and is_layer(unit) and size < numel:
            params = [*found.pop(before), *params]
            unit = f"{before.split(TO)[0]}{TO}{unit}"
        found[unit] = params
        before = unit
    return found


def check(options: Mapping[str, Any]) -> None:
    """ValueError unless units of as many elements as is asked for can be had."""
    numel = options.get(UNIT_NUMEL, 0)
    if numel < 0 or (numel and graph_pools.asks_for_pools(options)):
        raise ValueError(
            f"--suggested-communication-unit-size {numel}: give 0 or more, and not with "
            "--cuda-graph-impl local, which captures each layer for itself"
        )


def gathered(
    root: Mapping[str, int], units: Sequence[Mapping[str, int]], numel: int
) -> dict[str, int]:
    """Bytes by kind of weights that are gathered at a time where as much as a joined unit may be
    gathered ahead: beside a unit that computes, as many of the next ones as that lasts, or the two
    largest units if those are more. Empty for units that were not joined."""
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
