"""What the engine makes of a list of parameters: its units, their layouts, and what a rank holds.

The listing is partitioned, joined and laid out as the engine does it, and `diagnostics/memory.py`
says what buffers of these layouts take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from megatron_fsdp_adapter.core.config import Strategy
from megatron_fsdp_adapter.core.engine.partition import TO
from megatron_fsdp_adapter.core.layout import GroupLayout, ParamSpec, plan_group
from megatron_fsdp_adapter.core.layout.format import WeightFormat, plain
from megatron_fsdp_adapter.diagnostics.memory import (
    GATHERED_WEIGHTS,
    QUANTIZED_COPIES,
    Precision,
    held_by_rank,
    held_bytes,
    quantized_both_ways,
    unit_bytes,
)
from megatron_fsdp_adapter.models.quantization import PLAIN, Quantization
from megatron_fsdp_adapter.models.spec import EMBEDDING, ROOT, is_layer, is_linear_weight, number_of
from megatron_fsdp_adapter.sharding.unit_grouping import default_unit_numel
from megatron_fsdp_adapter.sharding.unsharded_budget import UnshardedUnits, unsharded_units

Row = tuple[str, str, tuple[int, ...], int]
"""Unit, name, shape and number of shards of a parameter."""


@dataclass(frozen=True)
class PlannedUnit:
    """A unit with the layouts of its groups; units of the same shapes share them. linear_numel:
    elements of what matrix products multiply by."""

    name: str
    layouts: tuple[GroupLayout, ...]
    linear_numel: int = 0

    @property
    def kind(self) -> str:
        """Of the module: units of one class with three or more of them take turns in two slots."""
        return "TransformerLayer" if is_layer(self.name) else self.name

    @property
    def layers(self) -> int:
        """How many transformer layers it is; 1 for any other unit."""
        first, _, last = self.name.partition(TO)
        return number_of(last) - number_of(first) + 1 if last else 1


@dataclass(frozen=True)
class PlannedModel:
    """A planned model: its units in the order of their parameters. `slots`: what `slots_wanted`
    says. `quantized`: what becomes of linear weights. `budget`: bytes for units that stay whole
    over a step. `graphs`: whether layers are in CUDA graphs. `ahead`: elements that may be gathered
    ahead of the unit that computes, if that is more than the next unit.
    """

    planned: tuple[PlannedUnit, ...]
    slots: Mapping[str, Any]
    quantized: Quantization = PLAIN
    budget: int = 0
    ahead: int = 0
    graphs: bool = False

    @cached_property
    def units(self) -> list[PlannedUnit]:
        """As they compute, the root unit last."""
        return sorted(self.planned, key=lambda unit: unit.name == ROOT)

    @property
    def layouts(self) -> list[GroupLayout]:
        """Of the groups of all units."""
        return [layout for unit in self.units for layout in unit.layouts]

    @property
    def num_shards(self) -> int:
        """Of dense parameters."""
        return max(layout.num_shards for layout in self.layouts)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(layout.item_numel for layout in self.layouts)

    @cached_property
    def fullest_rank(self) -> int:
        """The lowest of the ranks that hold most elements."""
        held, alike = [0] * self.num_shards, Counter(map(id, self.layouts))
        for layout in {id(one): one for one in self.layouts}.values():
            for rank, numel in enumerate(held_by_rank(layout)):
                held[rank] += numel * alike[id(layout)]
        return held.index(max(held))

    def is_single_rank(self, strategy: Strategy) -> Callable[[GroupLayout], bool]:
        """Whether a group's domain has one rank; of layers in graphs those of experts alone may."""
        may = strategy.shard_grads and not (self.graphs and self.num_shards == 1)
        return lambda layout: may and layout.num_shards == 1

    def kept(self, strategy: Strategy, precision: Precision) -> UnshardedUnits:
        """What of which units the budget keeps whole over a step."""
        forward_only = [at for at, unit in enumerate(self.units) if unit.name == EMBEDDING]
        whole = self.is_single_rank(strategy)
        layouts = [[one for one in unit.layouts if not whole(one)] for unit in self.units]
        return unsharded_units(layouts, strategy, precision, self.budget, forward_only)

    def bytes_held(self, strategy: Strategy, precision: Precision, rank: int) -> dict[str, int]:
        """Bytes by kind on `rank`."""
        whole, form = self.is_single_rank(strategy), self.quantized.products
        placed = {
            id(unit.layouts): [(layout, rank, whole(layout)) for layout in unit.layouts]
            for unit in self.units
        }
        held = held_bytes(
            [placed[id(unit.layouts)] for unit in self.units], [unit.kind for unit in self.units],
            self.kept(strategy, precision).rows, strategy, precision, self.ahead, **self.slots,
        )  # fmt: skip
        if form is not None:
            # What autograd keeps from forward to backward: of all layers, or of the one that is
            # computed again.
            copies = [quantized_both_ways(form, unit.linear_numel) for unit in self.units]
            held[QUANTIZED_COPIES] = max(copies) if self.quantized.recomputes else sum(copies)
        return held

    def gathered_ahead(self, strategy: Strategy, precision: Precision) -> int:
        """Bytes of gathered weights that the next forward needs first: the root unit's and the
        first unit's. They are gathered from the optimizer step on, while the host is still busy
        between two steps. In slots they take nothing more."""
        if self.slots["weight_slots"]:
            return 0
        rows, whole = self.kept(strategy, precision).rows, self.is_single_rank(strategy)
        held = (
            unit_bytes(self.units[at].layouts, rows[at], precision, 0, whole)
            for at in (0, len(rows) - 1)
        )
        return sum(one.get(GATHERED_WEIGHTS, 0) for one in held)


def plan_units(
    listing: Sequence[Row], dtype: torch.dtype, form: WeightFormat | None = None,
    unit_numel: int | None = None, fused: bool = True, **planner: Any,
) -> tuple[PlannedUnit, ...]:
    """Plans every unit once per set of shapes. `form`: of linear weights, None for `dtype`;
    `unit_numel`: elements up to which layers are joined to units, None for the default; `fused`:
    modules may write weight gradients by themselves; `planner`: options of `plan_group`. ValueError
    for weights that cannot be represented in their format."""
    units: dict[str, list[Row]] = {}
    for row in listing:
        units.setdefault(row[0], []).append(row)
    alike: dict[Any, tuple[tuple[GroupLayout, ...], int]] = {}
    found = []
    for unit, rows in _joined(units, unit_numel).items():
        key = (unit == ROOT, tuple(row[2:] for row in rows))
        if key not in alike:
            groups: dict[tuple[WeightFormat | None, int], list[ParamSpec]] = {}
            for _, fqn, shape, shards in rows:
                own = form if is_linear_weight(fqn) else None
                group = groups.setdefault((own, shards), [])
                spec = _spec(len(group), fqn, shape, dtype, own)
                group.append(replace(spec, from_autograd=not fused))
            layouts = tuple(plan_group(specs, n, **planner) for (_, n), specs in groups.items())
            alike[key] = layouts, _numel([row for row in rows if is_linear_weight(row[1])])
        found.append(PlannedUnit(unit, *alike[key]))
    return tuple(found)


def _spec(
    index: int, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, form: WeightFormat | None
) -> ParamSpec:
    try:
        granularity = (form or plain(dtype)).granularity(shape)
    except ValueError as error:
        name = form and form.name
        raise ValueError(f"{fqn} as {name}: {error}; change the model's widths") from error
    return ParamSpec(index, (fqn,), shape, dtype, True, granularity, form)


def _joined(units: Mapping[str, list[Row]], numel: int | None) -> dict[str, list[Row]]:
    """`units`, of which neighboring layers are one until it has `numel` elements, as the engine
    joins them; None for as many as it joins by default."""
    if numel is None:
        numel = default_unit_numel([_numel(units[unit]) for unit in units if is_layer(unit)])
    found: dict[str, list[Row]] = {}
    before = ""
    for unit, rows in units.items():
        if is_layer(before) and is_layer(unit) and _numel(found[before]) < numel:
            rows = [*found.pop(before), *rows]
            unit = f"{before.split(TO)[0]}{TO}{unit}"
        found[unit] = rows
        before = unit
    return found


def _numel(rows: Sequence[Row]) -> int:
    return sum(math.prod(shape) for _, _, shape, _ in rows)
