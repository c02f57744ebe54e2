"""The modules of a Megatron model that are gathered and reduced as units, and their parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from ...core.config import EngineConfig
from ...core.engine.partition import (
    UnitPlan,
    managed_params,
    partition,
    unit_modules,
    units_that_look_up,
)
from ...plan.unit_classes import classes_of
from ...quantized import format_of
from ..layers.activation_offload import FINE_GRAINED
from ..layers.fused_wgrad import Observe, asks_fusion, grad_writer
from ..layers.wgrad_probe import (
    observed,
    precisions_of,
    quantized_precision,
    read_by_operations,
)
from ..options.rules import is_on
from .arguments import Arguments
from .domains import domain_name
from .tensor_parallel import mark_tensor_parallel, tensor_parallel_mode

DEFAULT_UNIT_MODULES: tuple[type[nn.Module], ...] = (TransformerLayer, MambaLayer)
LOOK_UPS = {LanguageModelEmbedding, VocabParallelEmbedding, nn.Embedding, nn.Dropout}
"""Classes whose backward reads no weights."""

Modules = dict[str, nn.Module]
"""Modules by their names."""


def _has_tied_weight(module: nn.Module) -> bool:
    """True if embedding and output layer use the same parameter on this stage.

    With pipeline parallelism each stage has a copy of its own, which is used once. On a last stage
    that predicts further tokens (MTP) the embedding is called too."""
    for child in module.modules():
        if not is_on(child, "share_embeddings_and_output_weights"):
            continue
        has_embedding = getattr(child, "pre_process", True)
        calls_embedding = has_embedding or is_on(child, "mtp_process")
        if calls_embedding and getattr(child, "post_process", True):
            return True
    return False


def _is_read_from_outside(module: nn.Module) -> bool:
    """True if prediction heads (MTP) read the output layer's weight past its forward, and call the
    embedding without gradients."""
    return is_on(getattr(module, "config", None), "mtp_detach_heads")


def _default_units(module: nn.Module) -> Modules:
    """Transformer and Mamba layers, and embedding and output layer unless their weights are tied
    or read by other modules: such a weight belongs to the root unit, which stays gathered."""
    if _has_tied_weight(module) or _is_read_from_outside(module):
        return unit_modules(module, lambda child: isinstance(child, DEFAULT_UNIT_MODULES))
    classes = (*DEFAULT_UNIT_MODULES, LanguageModelEmbedding)
    units = unit_modules(module, lambda child: isinstance(child, classes))
    for name, child in module.named_modules():
        if name.split(".")[-1] == "output_layer":
            units[name] = child
    return units


def _parts_of_experts(experts: nn.Module) -> list[nn.Module]:
    """The modules of a layer's experts that are units of their own:

    - each expert, if experts run one after the other;
    - each grouped linear layer, if experts are grouped;
    - all experts together, if Transformer Engine's operations read their weights without calling
      their modules."""
    one_by_one = getattr(experts, "local_experts", None)
    if isinstance(one_by_one, nn.ModuleList):
        return list(one_by_one)
    if is_on(getattr(experts, "config", None), "use_transformer_engine_op_fuser"):
        return [experts]
    return [child for child in experts.children() if next(child.parameters(), None) is not None]


def _with_parts_of_layers(module: nn.Module, units: Modules) -> Modules:
    """The `units` and also parts of experts, in the order of modules."""
    wanted = set(map(id, units.values()))
    for layer in module.modules():
        if isinstance(layer, BaseMoELayer):
            wanted.update(map(id, _parts_of_experts(layer.experts)))
    return unit_modules(module, lambda child: id(child) in wanted)


def chosen_units(
    module: nn.Module, unit_classes: Sequence[type[nn.Module] | str] | None, parts: bool = False
) -> Modules:
    """The units: the default ones, or modules of the classes that the user names. parts: by default
    parts of experts are units too, inside of their layers."""
    if unit_classes is None:
        units = _default_units(module)
        return _with_parts_of_layers(module, units) if parts else units
    named = classes_of(module, unit_classes)
    return unit_modules(module, lambda child: isinstance(child, named))


def plan_units(given: Arguments, units: Modules) -> list[UnitPlan]:
    """The plan of the units: the group of each parameter. Marks each parameter with the way in
    which tensor parallelism splits it."""
    entries = []
    for entry in managed_params(given.module, units):
        param = entry.param
        fqn = entry.fqns[0]
        owner, name = entry.slots[0]
        mark_tensor_parallel(param, tensor_parallel_mode(param, owner, name))
        if not given.manages(fqn):
            continue  # it stays as it is
        entry = replace(
            entry,
            domain=domain_name(param, fqn),
            split=getattr(param, "_tp_partition_dim", None),
            format=format_of(entry),
        )
        entries.append(entry)
    return partition(units, entries, units_that_look_up(units, LOOK_UPS))


def with_writers(
    plans: Sequence[UnitPlan], given: Arguments, engine_config: EngineConfig
) -> list[UnitPlan]:
    """The `plans` with the writer of each gradient (`grad_writer`).

    That depends on the dtype of the buffer that modules write into, and so on the strategy of the
    unit. ValueError: a module whose fused weight gradients cannot be used."""
    if not asks_fusion(given.config):
        return list(plans)  # autograd writes all of them
    observers: dict[torch.dtype, Observe] = {}
    found = []
    for plan in plans:
        groups = {}
        for key, managed in plan.groups.items():
            own = engine_config.for_group(plan.strategy, key.domain)
            policy = own.policy
            written = policy.comm_dtype if own.strategy.shard_grads else policy.grads_dtype
            if written not in observers:
                observers[written] = _observer(given, written)
            observe = observers[written]
            groups[key] = [replace(entry, writer=grad_writer(entry, observe)) for entry in managed]
        found.append(replace(plan, groups=groups))
    return found


def _observer(given: Arguments, written: torch.dtype) -> Observe:
    """A function that returns what a module does to a `main_grad` of the dtype `written`."""
    config = given.config
    return functools.partial(
        observed,
        precisions=precisions_of(config),
        main_dtype=written,
        device=given.device,
        quantized=quantized_precision(config),
        by_operations=read_by_operations(given.module),
        hooks_inside=is_on(config, FINE_GRAINED),
    )
