"""How many layers of a configuration are one unit, as the wrapper will join them."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_fsdp_adapter.cli import joined_units
from megatron_fsdp_adapter.megatron.options import unit_grouping
from megatron_fsdp_adapter.megatron.options.cuda_graphs import FULL_ITERATION, LOCAL

from .features import Features
from .shapes import Parallel, Shape, listing


def unit_numel(
    shape: Shape, parallel: Parallel, features: Features, graph: bool, stage: int
) -> int:
    """Elements up to which layers of a pipeline stage are joined, in each of its model chunks; 0
    for not at all. graph: of the iteration."""
    impl = FULL_ITERATION if graph else LOCAL if features.layer_graphs else None
    options = Namespace(**{"cuda_graph_impl": impl, unit_grouping.UNIT_NUMEL: features.unit_numel})
    numels = _layer_numels(shape, replace(parallel, virtual=1, context=1, recompute=False), stage)
    of_chunk = numels[: -(-len(numels) // parallel.virtual)]
    return unit_grouping.unit_numel(options, options, of_chunk)


@lru_cache(maxsize=512)
def _layer_numels(shape: Shape, split: Parallel, stage: int) -> tuple[int, ...]:
    found: Counter[str] = Counter()
    for unit, _, full, _ in listing(shape, split, stage):
        if joined_units.is_layer(unit):
            found[unit] += math.prod(full)
    return tuple(found.values())


def layers_of_unit(units: Sequence[str]) -> int:
    """The most layers that one of the units, by name, is joined of."""
    return max(map(joined_units.layers_of, units))
