"""The plan of a model: its units, their parameters and strategies. It is made before any parameter
moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...build.building import with_single_rank_domains
from ...core.config import EngineConfig
from ...core.distributed_index import FSDPDistributedIndex
from ...core.engine.partition import UnitPlan
from ...core.topology import Domains
from ...plan.unit_grouping import group_layers, layer_numels
from ...plan.unsharded_budget import UnshardedUnits, with_unsharded_units
from ..elastic.manager import manager_of
from ..options import ddp_options
from ..options.rules import is_on
from ..options.table import GATHER_PARTS
from .arguments import Arguments
from .domains import domains_of
from .units import chosen_units, plan_units, with_writers


@dataclass(frozen=True)
class ModelPlan:
    """All decisions about a model's sharding.

    Attributes:
        units: with their groups and strategies, the root last. config: of the engine. domains: by
            name.
        classes: names of the classes that are units, sorted.
        kept: the units that stay unsharded over a step, chosen for `budget` bytes; None without.
        budget: None if it is found while training.
    """

    units: Sequence[UnitPlan]
    config: EngineConfig
    domains: Domains
    classes: Sequence[str]
    kept: UnshardedUnits | None
    budget: int | None


def plan_model(given: Arguments, index: FSDPDistributedIndex) -> ModelPlan:
    """The plan of a module. The options were checked before (`problems.py`).

    ValueError for a unit class that matches nothing, or a module whose fused weight gradients
    cannot be used."""
    config = given.config
    ddp_config = given.ddp_config
    units = chosen_units(given.module, given.unit_classes, is_on(ddp_config, GATHER_PARTS))
    plans = plan_units(given, units)
    # Layers are not grouped if the user names the classes that are units.
    layers = layer_numels(plans) if given.unit_classes is None else []
    plans = group_layers(plans, ddp_options.unit_numel(config, ddp_config, layers))
    by_name = domains_of(index, manager_of(ddp_config, given.device))
    engine_config = ddp_options.engine_config(ddp_config)
    engine_config = with_single_rank_domains(engine_config, by_name)
    budget = ddp_options.unsharded_budget(config, ddp_config)
    kept = None
    if budget:
        plans, kept = with_unsharded_units(plans, engine_config, by_name, budget)
    plans = with_writers(plans, given, engine_config)
    classes = sorted({type(unit).__name__ for unit in units.values()})
    return ModelPlan(plans, engine_config, by_name, classes, kept, budget)
