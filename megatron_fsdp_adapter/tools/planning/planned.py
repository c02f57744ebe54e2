"""Plans a model's parameters as the engine does: units, layouts, and bytes that a rank holds.

The listing is partitioned, grouped and laid out as by the engine; `plan/memory.py` computes
the size of the buffers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from megatron_fsdp_adapter.core.config import Strategy, count_sharded
from megatron_fsdp_adapter.core.engine.partition import TO
from megatron_fsdp_adapter.core.layout import GroupLayout, ParamSpec, plan_group
from megatron_fsdp_adapter.core.layout.format import WeightFormat, plain
from megatron_fsdp_adapter.core.layout.ranges import Shape, nested_shard_rank
from megatron_fsdp_adapter.plan.memory import (
    QUANTIZED_COPIES,
    Bytes,
    PlacedGroup,
    Precision,
    held_by_rank,
    held_bytes,
    quantized_both_ways,
)
from megatron_fsdp_adapter.plan.unsharded_budget import OwnGroup, UnshardedUnits, unsharded_units
from megatron_fsdp_adapter.tools.models.quantization import PLAIN, Quantization
from megatron_fsdp_adapter.tools.models.spec import (
    DENSE,
    EMBEDDING,
    EXPERT,
    ROOT,
    WHOLE,
    ModelSpec,
    Parallel,
    is_layer,
    is_linear_weight,
    listing,
    number_of,
)

PlannedRow = tuple[str, str, Shape, str, int]
"""Unit, name, shape, domain and number of shards of a parameter."""


@dataclass(frozen=True)
class PlannedUnit:
    """A unit with the layouts of its groups. Units of the same shapes share one tuple of layouts.
    linear_numel: elements of GEMM weights. domains: of the groups."""

    name: str
    layouts: tuple[GroupLayout, ...]
    linear_numel: int = 0
    domains: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of the module: three or more units of one kind take turns in two slots."""
        return "TransformerLayer" if is_layer(self.name) else self.name

    @property
    def groups(self) -> list[tuple[GroupLayout, str]]:
        """Layout and domain of each group; without domains all are dense."""
        domains = self.domains or (DENSE,) * len(self.layouts)
        return list(zip(self.layouts, domains, strict=True))

    @property
    def layers(self) -> int:
        """Number of transformer layers; 1 for any other unit."""
        first, _, last = self.name.partition(TO)
        if not last:
            return 1
        return number_of(last) - number_of(first) + 1


@dataclass(frozen=True)
class Replicas:
    """The replicas of one kind of parameters."""

    # The number of them.
    count: int = 1
    # Whether they split their shards again.
    splits: bool = False

    @property
    def parts(self) -> int:
        """The number of parts of each shard."""
        return self.count if self.splits else 1

    def shards(self, ranks: int) -> int:
        """The number of shards over so many ranks."""
        return ranks // self.count * self.parts


ONE_REPLICA = Replicas()


@dataclass(frozen=True)
class PlannedModel:
    """A planned model.

    planned: units in the order of their parameters. slots: the result of `slots_wanted`. quantized:
    quantization of linear weights. budget: bytes for units that stay unsharded over a step. ahead:
    elements that are prefetched; the next unit is, however large it is. of_experts: the strategy of
    experts, if they have another. replicas: by domain, where there are several.
    """

    planned: tuple[PlannedUnit, ...]
    slots: Mapping[str, Any]
    quantized: Quantization = PLAIN
    budget: int = 0
    ahead: int = 0
    of_experts: Strategy | None = None
    replicas: Mapping[str, Replicas] = field(default_factory=dict)

    @cached_property
    def units(self) -> list[PlannedUnit]:
        """Units in the order of computation, the root unit last."""
        return sorted(self.planned, key=lambda unit: unit.name == ROOT)

    @property
    def layouts(self) -> list[GroupLayout]:
        """Layouts of the groups of all units."""
        return [layout for unit in self.units for layout in unit.layouts]

    @property
    def groups(self) -> list[tuple[GroupLayout, str]]:
        """Layout and domain of the groups of all units."""
        return [group for unit in self.units for group in unit.groups]

    def _replicas(self, domain: str) -> Replicas:
        return self.replicas.get(domain, ONE_REPLICA)

    def _axis_size(self, layout: GroupLayout, domain: str) -> int:
        """The number of ranks of the shard axis."""
        return layout.num_shards // self._replicas(domain).parts

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks that have dense parameters."""
        return max(
            self._axis_size(layout, domain) * self._replicas(domain).count
            for layout, domain in self.groups
        )

    def _place(self, layout: GroupLayout, domain: str, rank: int) -> tuple[int, int]:
        """A rank's place in its domain: its number on the shard axis, and among the replicas.
        Experts have fewer ranks than there are, because neighboring ranks have different experts;
        those have the same place."""
        size = self._axis_size(layout, domain)
        own = rank * size * self._replicas(domain).count // self.num_ranks
        return own % size, own // size

    def _shard(self, layout: GroupLayout, domain: str, rank: int) -> int:
        """The number of the shard that a rank has."""
        inner, outer = self._place(layout, domain, rank)
        replicas = self._replicas(domain)
        return nested_shard_rank(inner, outer, replicas.count) if replicas.splits else inner

    @cached_property
    def fullest_rank(self) -> int:
        """The lowest rank that holds most elements."""
        held = [0] * self.num_ranks
        alike = Counter(map(id, self.layouts))
        for layout, domain in {id(one[0]): one for one in self.groups}.values():
            numels = held_by_rank(layout)
            for rank in range(self.num_ranks):
                number = self._shard(layout, domain, rank)
                held[rank] += numels[number] * alike[id(layout)]
        return held.index(max(held))

    def is_single_rank(self, strategy: Strategy, layout: GroupLayout, domain: str) -> bool:
        """True for a group whose domain has one rank, if its strategy shards gradients."""
        return strategy.shard_grads and self._axis_size(layout, domain) == 1

    def kept(self, strategy: Strategy, precision: Precision) -> UnshardedUnits:
        """The units that the budget keeps unsharded over a step."""
        forward_only = [i for i, unit in enumerate(self.units) if unit.name == EMBEDDING]
        units = []
        for unit in self.units:
            found = []
            for layout, domain in unit.groups:
                own = self._of_domain(domain, strategy)
                if not self.is_single_rank(own, layout, domain):
                    found.append(OwnGroup(layout, own, self._replicas(domain).parts))
            units.append(found)
        return unsharded_units(units, strategy, precision, self.budget, forward_only)

    def _of_domain(self, domain: str, strategy: Strategy) -> Strategy:
        """The strategy of a domain. strategy: of dense parameters."""
        if domain == EXPERT and self.of_experts is not None:
            return self.of_experts
        return strategy

    def _placed(
        self, unit: PlannedUnit, strategy: Strategy, row: Strategy, rank: int
    ) -> list[PlacedGroup]:
        """The groups of a unit on `rank`. strategy: of the model. row: of the unit."""
        found = []
        for layout, domain in unit.groups:
            of_domain = self._of_domain(domain, strategy)
            own = min(row, of_domain, key=count_sharded)
            whole = self.is_single_rank(of_domain, layout, domain)
            number = self._shard(layout, domain, rank)
            parts = self._replicas(domain).parts
            if parts > 1 and not own.shard_main:
                _, number = self._place(layout, domain, rank)
                layout = layout.with_shards(parts)
            found.append(PlacedGroup(layout, number, whole, own, of_domain, parts))
        return found

    def bytes_held(self, strategy: Strategy, precision: Precision, rank: int) -> Bytes:
        """Bytes by kind on `rank`."""
        kept = self.kept(strategy, precision).rows
        known: dict[tuple[int, str], list[PlacedGroup]] = {}
        units = []
        for unit, row in zip(self.units, kept, strict=True):
            key = (id(unit.layouts), row.name)  # units that share both share one list
            if key not in known:
                known[key] = self._placed(unit, strategy, row, rank)
            units.append(known[key])
        kinds = [unit.kind for unit in self.units]
        held = held_bytes(units, kinds, precision, self.ahead, **self.slots)
        form = self.quantized.products
        if form is not None:
            # Autograd saves copies from forward to backward: of all layers, or of the recomputed
            # one.
            copies = [quantized_both_ways(form, unit.linear_numel) for unit in self.units]
            held[QUANTIZED_COPIES] = max(copies) if self.quantized.recomputes else sum(copies)
        return held


@lru_cache(maxsize=512)
def planned_units(
    spec: ModelSpec,
    dense: int,
    expert: int,
    dtype: torch.dtype,
    form: WeightFormat | None = None,
    unit_numel: int = 0,
    fused: bool = True,
    split: Parallel = WHOLE,
    stage: int = 0,
) -> tuple[PlannedUnit, ...]:
    """The units of a rank of a pipeline stage. Units of the same shapes are planned once.

    dense, expert: number of shards of the parameters of each domain; form: format of linear weights
    (None: `dtype`); unit_numel: elements up to which layers are grouped into units; fused: True if
    modules write weight gradients; split: model-parallel sizes. Raises ValueError for weights that
    cannot be represented in their format."""
    shards = {DENSE: dense, EXPERT: expert}
    units: dict[str, list[PlannedRow]] = {}
    for unit, fqn, shape, domain in listing(spec, split, stage):
        units.setdefault(unit, []).append((unit, fqn, shape, domain, shards[domain]))
    alike: dict[Any, tuple[tuple[GroupLayout, ...], int, tuple[str, ...]]] = {}
    found = []
    for unit, rows in _grouped(units, unit_numel).items():
        key = (unit == ROOT, tuple(row[2:] for row in rows))
        if key not in alike:
            layouts, domains = _layouts(rows, dtype, form, fused)
            numel = _numel([row for row in rows if is_linear_weight(row[1])])
            alike[key] = layouts, numel, domains
        found.append(PlannedUnit(unit, *alike[key]))
    return tuple(found)


def _layouts(
    rows: Sequence[PlannedRow], dtype: torch.dtype, form: WeightFormat | None, fused: bool
) -> tuple[tuple[GroupLayout, ...], tuple[str, ...]]:
    """The layouts and the domains of a unit's groups. A group has parameters of one format and
    domain."""
    groups: dict[tuple[WeightFormat | None, str, int], list[ParamSpec]] = {}
    for _, fqn, shape, domain, number in rows:
        own = form if is_linear_weight(fqn) else None
        group = groups.setdefault((own, domain, number), [])
        spec = _spec(len(group), fqn, shape, dtype, own)
        group.append(replace(spec, from_autograd=not fused))
    layouts = [plan_group(specs, number) for (_, _, number), specs in groups.items()]
    return tuple(layouts), tuple(domain for _, domain, _ in groups)


@lru_cache(maxsize=512)
def layer_numels(spec: ModelSpec, split: Parallel = WHOLE, stage: int = 0) -> tuple[int, ...]:
    """Elements of each layer of a pipeline stage."""
    found: Counter[str] = Counter()
    for unit, _, full, _ in listing(spec, split, stage):
        if is_layer(unit):
            found[unit] += math.prod(full)
    return tuple(found.values())


def fullest_stage(spec: ModelSpec, split: Parallel) -> int:
    """The pipeline stage whose ranks have most parameters; the first of several."""
    counts = []
    for stage in range(split.pipeline):
        rows = listing(spec, split, stage)
        counts.append(sum(math.prod(shape) for _, _, shape, _ in rows))
    return counts.index(max(counts))


def _spec(
    index: int, fqn: str, shape: Shape, dtype: torch.dtype, form: WeightFormat | None
) -> ParamSpec:
    try:
        granularity = (form or plain(dtype)).granularity(shape)
    except ValueError as error:
        name = form and form.name
        raise ValueError(f"{fqn} as {name}: {error}. Change the model's widths") from error
    return ParamSpec(index, (fqn,), shape, dtype, True, granularity, form)


def _grouped(units: Mapping[str, list[PlannedRow]], numel: int) -> dict[str, list[PlannedRow]]:
    """`units` with neighboring layers grouped up to `numel` elements, as the engine groups them."""
    found: dict[str, list[PlannedRow]] = {}
    before = ""
    for unit, rows in units.items():
        if is_layer(before) and is_layer(unit) and _numel(found[before]) < numel:
            rows = [*found.pop(before), *rows]
            unit = f"{before.split(TO)[0]}{TO}{unit}"
        found[unit] = rows
        before = unit
    return found


def _numel(rows: Sequence[PlannedRow]) -> int:
    return sum(math.prod(shape) for _, _, shape, _, _ in rows)
