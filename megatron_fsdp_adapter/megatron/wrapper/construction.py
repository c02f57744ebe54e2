"""The engine of a Megatron model, from the constructor's arguments."""

from __future__ import annotations

from typing import Any

from ...build.building import build_engine
from ...core.distributed_index import FSDPDistributedIndex
from ...core.engine.engine import FsdpEngine
from ...quantized import TransformerEngineParams
from ..inner_module import ParamAndGradBuffer
from ..layers.fused_wgrad import asks_fusion
from ..layers.te_weight_cache import CACHE_OPTION, begin_delayed_scaling, switch_off_weight_cache
from ..options import capability, ddp_options, staging_options
from ..options.rules import is_on
from ..options.settings import WRAPPER, settle
from ..options.table import DECOUPLED
from .arguments import Arguments
from .domains import broadcast_left_alone
from .model_plan import ModelPlan, plan_model
from .problems import checked_index

__all__ = ["Arguments", "build", "checked_index", "force_options"]


def build(
    given: Arguments, index: FSDPDistributedIndex
) -> tuple[FsdpEngine, ModelPlan, ParamAndGradBuffer]:
    """Moves the parameters of the module into an engine's buffers. Returns the engine, its plan,
    and the object that Megatron's code sees as the buffers. Collective.

    Raises:
        ValueError: a unit class that matches nothing; ranks whose models differ.
        CommunicationError, RuntimeError: another rank has failed or is late.
    """
    module = given.module
    ddp_config = given.ddp_config
    plan = plan_model(given, index)
    is_quantized = any(key.quantized for unit in plan.units for key in unit.groups)
    memory = staging_options.slot_memory(ddp_config, index, given.device)
    engine = build_engine(
        FsdpEngine,
        "FullyShardedDataParallel",
        module,
        plan.units,
        plan.domains,
        plan.config,
        given.device,
        given.initializer_of,
        budget=ddp_options.step_budget(given.config, ddp_config),
        grad_check=ddp_options.grad_check(ddp_config),
        allocate_slots=None if memory is None else memory.allocate,
        quantized=TransformerEngineParams() if is_quantized else None,
    )
    broadcast_left_alone(module, index, given.device, given.manages)
    begin_delayed_scaling(module, given.config)
    return engine, plan, ParamAndGradBuffer(engine, memory, is_on(ddp_config, DECOUPLED))


def force_options(given: Arguments, engine: FsdpEngine) -> dict[str, Any]:
    """Sets the options that the wrapper needs in both configs; returns those that have changed, and
    their values. Switches off Transformer Engine's cache of quantized weights where it must not be
    used."""
    changes = settle(WRAPPER, {"ddp": given.ddp_config, "model": given.config})
    forced = {change.option: change.after for change in changes}
    has_recipe = capability.recipe_of(given.config) is not None
    shards_weights = any(row.shard_weights for row in engine.config.strategies)
    would_copy = has_recipe and shards_weights
    must_be_off = would_copy or asks_fusion(given.config)
    if must_be_off and switch_off_weight_cache(given.module):
        forced[CACHE_OPTION] = True
    return forced
