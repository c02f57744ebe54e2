"""The engine of a Megatron model, from the constructor's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.engine.engine import FsdpEngine
from ..quantized import TransformerEngineParams
from ..sharding.building import build_engine
from .announcement import announcement
from .construction_problems import Arguments, checked_domains
from .domains import ModelDomains
from .fused_wgrad import asks_fusion
from .inner_module import ParamAndGradBuffer
from .model_plan import ModelPlan, plan_model
from .options import capability, ddp_options, staging_options
from .options.settings import WRAPPER, settle
from .te_weight_cache import CACHE_OPTION, begin_delayed_scaling, switch_off_weight_cache

__all__ = ["Arguments", "Built", "build", "checked_domains", "force_options"]


@dataclass(frozen=True)
class Built:
    """An engine, the plan that it was made by, what allocates its slots (None for ordinary memory),
    and the buffers as Megatron's code sees them."""

    engine: FsdpEngine
    plan: ModelPlan
    slot_memory: staging_options.RegisteredMemory | None
    param_and_grad_buffer: ParamAndGradBuffer

    def announcement(self, config: Any, forced: Mapping[str, Any]) -> str:
        """The line that the wrapper prints; see `announcement.announcement`."""
        return announcement(self.plan, self.engine.groups, config, forced)


def build(given: Arguments, domains: ModelDomains) -> Built:
    """Moves the parameters of the module into an engine's buffers. Collective.

    Raises:
        ValueError: a unit class that matches nothing; ranks whose models differ.
        CommunicationError, RuntimeError: another rank has failed or is late.
    """
    module, config, ddp_config = given.module, given.config, given.ddp_config
    plan = plan_model(module, given.unit_classes, config, ddp_config, domains)
    memory = staging_options.slot_memory(ddp_config, domains.index, given.device)
    engine = build_engine(
        FsdpEngine,
        "FullyShardedDataParallel",
        module,
        plan.units,
        plan.domains,
        plan.config,
        given.device,
        given.initializer_of,
        grad_check=ddp_options.grad_check(ddp_config),
        allocate_slots=None if memory is None else memory.allocate,
        quantized=TransformerEngineParams() if plan.is_quantized else None,
    )
    domains.broadcast_left_alone(module)
    begin_delayed_scaling(module, config)
    decoupled = ddp_options.decouples_grads(ddp_config)
    return Built(engine, plan, memory, ParamAndGradBuffer(engine, memory, decoupled))


def force_options(given: Arguments, engine: FsdpEngine) -> dict[str, Any]:
    """Sets the options that the wrapper needs in both configs, and switches off the cache of
    quantized weights where it cannot be used; what was set, and its value."""
    changes = settle(WRAPPER, {"ddp": given.ddp_config, "model": given.config})
    forced = {change.option: change.after for change in changes}
    quantizes = capability.recipe_of(given.config) is not None
    needs_none = asks_fusion(given.config) or (
        quantizes and engine.config.strategy.shard_weights
    )
    if needs_none and switch_off_weight_cache(given.module):
        forced[CACHE_OPTION] = True
    return forced
