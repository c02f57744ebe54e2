"""Neighboring layers as one unit: which are grouped, and the default group size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron_fsdp_adapter.core.engine.partition import TO, UnitPlan

UNIT_NUMEL = "suggested_communication_unit_size"
"""The option with the elements up to which layers are joined."""

JOINED_NUMEL = 100_000_000
JOINED_PART = 16
"""Limits of a joined unit by default: its elements; its part of all layers, as a reciprocal.
Measured (docs/contributing/results_launch.md) with layers of 61M elements, joined by two to units
of 122M."""


def group_layers(plans: Sequence[UnitPlan], numel: int) -> list[UnitPlan]:
    """`plans` with neighbors joined until a unit has `numel` elements: small units cost the host as
    much time as large ones.

    Two neighbors are joined if their modules are of one list and one class, backward reads the
    weights of both or of neither, and neither is inside another unit or contains one.
    """
    found: list[UnitPlan] = []
    alone = _alone(plans)
    for plan in plans:
        if found and found[-1].numel < numel and _are_alike(found[-1], plan, alone):
            plan = as_one_unit(found.pop(), plan)
        found.append(plan)
    return found


def default_unit_numel(layer_numels: Sequence[int]) -> int:
    """Elements up to which neighboring layers are grouped by default; 0 for not at all.

    The result is `JOINED_NUMEL`, or a sixteenth of the elements of all layers if that is less. A
    unit that has reached it is joined with no further layer. So at least eight units remain, none
    with more than an eighth of the elements. Nothing is grouped in models with fewer than 16
    layers, or if one layer alone reaches the limit.

    Args:
        layer_numels: elements of each layer that a rank has in one model chunk.
    """
    # `+ 1`: each of 16 equal layers is below the limit.
    numel = min(JOINED_NUMEL, sum(layer_numels) // JOINED_PART + 1)
    return numel if max(layer_numels, default=numel) < numel else 0


def layer_numels(plans: Sequence[UnitPlan]) -> list[int]:
    """Elements of each layer: a unit with others of its class in the same list. Units that are
    inside others, or contain others, do not count."""
    alone = _alone(plans)
    layers = [plan for plan in plans if plan.name in alone]
    count = Counter(_kind(plan) for plan in layers)
    return [plan.numel for plan in layers if count[_kind(plan)] > 1]


def _alone(plans: Sequence[UnitPlan]) -> set[str]:
    """Names of the units that are modules, are inside no other unit and contain none."""
    alone = set()
    around: set[str] = set()  # names of modules that contain a unit
    for plan in plans:
        if plan.module is None:
            continue
        if not plan.inside:
            alone.add(plan.name)
        levels = plan.name.split(".")
        around.update(".".join(levels[:depth]) for depth in range(1, len(levels)))
    return alone - around


def _kind(plan: UnitPlan) -> tuple[str, type]:
    """Name of the list that has the unit's last module, and the class of the unit's first one,
    which is that of all its modules."""
    holder, _, _ = plan.name.split(TO)[-1].rpartition(".")
    return holder, type(plan.module)


def _are_alike(one: UnitPlan, other: UnitPlan, alone: set[str]) -> bool:
    if not alone.issuperset([*one.name.split(TO), other.name]):
        return False
    if _kind(one) != _kind(other):
        return False
    return one.backward_reads_weights == other.backward_reads_weights


def as_one_unit(one: UnitPlan, other: UnitPlan) -> UnitPlan:
    """The plan of one unit with the parameters and modules of both; other settings are those of
    `one`."""
    groups = {key: list(managed) for key, managed in one.groups.items()}
    for key, managed in other.groups.items():
        groups.setdefault(key, []).extend(managed)
    first = one.name.split(TO)[0]
    name = f"{first}{TO}{other.name}"
    more = (*one.more, *other.modules)
    reads = one.backward_reads_weights or other.backward_reads_weights
    return replace(one, name=name, groups=groups, more=more, backward_reads_weights=reads)


def described(plans: Sequence[UnitPlan]) -> str:
    """A description of grouped layers, for the line that a wrapper prints; empty if there are
    none."""
    grouped = [plan for plan in plans if plan.more]
    if not grouped:
        return ""
    largest = max(grouped, key=lambda plan: plan.numel)
    return (
        f"layers are joined by {len(largest.modules)} to units of {largest.numel} elements "
        f"({UNIT_NUMEL}=0 leaves them apart)"
    )
