"""Makes the engine that shards a plain PyTorch module."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from ..build.auto_budget import AutoBudget
from ..build.building import build_engine, with_single_rank_domains
from ..build.grad_check import GradCheck
from ..build.guards import refuse_conversions
from ..build.materialize import meta_problems, own_initializer, target_device
from ..build.shard_attributes import mark_shard
from ..core.config import EngineConfig
from ..core.engine.partition import managed_params, partition, unit_modules, units_that_look_up
from ..core.problems import raise_problems
from ..core.topology import ShardDomain
from ..plan.module_problems import module_problems, place_problems
from ..plan.unit_classes import UNIT_CLASSES_OPTION as UNITS
from ..plan.unit_classes import classes_of, repeated_layers
from ..plan.unit_grouping import described, group_layers
from ..plan.unsharded_budget import AUTO, GIB, with_unsharded_units
from ..quantized import TransformerEngineParams, format_of
from ..state.sharded_state_dict import register_state_dict_hooks
from .casts import cast_inputs_of
from .optimizer_rows import watch_steps
from .user_loop import UserLoopEngine

SUBJECT = "fully_shard_model"


def engine_for(
    module: nn.Module,
    named: Sequence[type[nn.Module] | str] | None,
    domains: Mapping[str, ShardDomain],
    config: EngineConfig,
    check: GradCheck | None,
    budget_gib: float | str = 0.0,
    unit_numel: int = 0,
) -> UserLoopEngine:
    """The engine that shards `module`. Collective. Call `raise_model_problems` first.

    budget_gib: for units that stay unsharded over a step; "auto": it is found while training.
    unit_numel: elements up to which neighboring layers are joined to a unit."""
    units = _chosen_units(module, named)
    dtype = config.policy.compute_dtype
    entries = []
    for entry in managed_params(module, units):
        entries.append(replace(entry, format=format_of(entry), compute_dtype=dtype))
    plans = partition(units, entries, units_that_look_up(units, {nn.Embedding}))
    plans = group_layers(plans, unit_numel)
    config = with_single_rank_domains(config, domains)
    finds_budget = budget_gib == AUTO
    given = 0 if finds_budget else int(float(budget_gib) * GIB)
    kept = None
    if given:
        plans, kept = with_unsharded_units(plans, config, domains, given)
    engine = build_engine(
        UserLoopEngine,
        SUBJECT,
        module,
        plans,
        dict(domains),
        config,
        target_device(module, None),
        own_initializer,
        budget=AutoBudget() if finds_budget else None,
        grad_check=check,
        quantized=TransformerEngineParams(),
    )
    if dtype is not None:
        for each in (*units.values(), module):
            cast_inputs_of(each, dtype)
    if dist.get_rank() == 0:
        if named is None:
            _announce(module, list(units.values()), engine)
        texts = [described(plans)]
        if kept is not None:
            texts.append(kept.described(f"{budget_gib:g}"))
        for text in filter(None, texts):
            print(f"{SUBJECT}: {text}", flush=True)
    return engine


def _chosen_units(
    module: nn.Module, named: Sequence[type[nn.Module] | str] | None
) -> dict[str, nn.Module]:
    """The modules that are units, by name: those of the classes `named`; None: repeated layers."""
    if named is None:
        layers = {id(layer) for layer in repeated_layers(module)}
        return unit_modules(module, lambda child: id(child) in layers)
    classes = classes_of(module, named)
    return unit_modules(module, lambda child: isinstance(child, classes))


def _announce(module: nn.Module, units: Sequence[nn.Module], engine: UserLoopEngine) -> None:
    """Prints the units, which the caller has not named, so that the user sees the choice."""
    count = len(engine.units)
    largest = max(unit.weight_bytes for unit in engine.units) / GIB
    if count == 1:
        text = (
            f"1 unit, whose weights, {largest:.3f} GiB, are gathered at once: "
            f"{type(module).__name__} has no layers that repeat (_no_split_modules, a ModuleList, "
            f"ModuleDict or Sequential). Name their class in {UNITS}"
        )
    else:
        kinds = Counter(type(unit).__name__ for unit in units)
        counted = ", ".join(f"{number} {name}" for name, number in kinds.items())
        text = (
            f"{count} units ({counted}, root) of at most {largest:.3f} GiB of weights; "
            f"{UNITS} names others"
        )
    print(f"{SUBJECT}: {text}", flush=True)


def raise_model_problems(
    module: nn.Module,
    classes: Sequence[type[nn.Module] | str] | None,
    main: torch.dtype | None,
    on_meta: bool,
) -> None:
    """ValueError with all problems of `module`, its unit classes, the dtype of main weights, and
    parameters on the meta device."""
    found = module_problems(module, classes, main)
    found += place_problems(module, None)
    found += meta_problems(module, on_meta, own_initializer)
    raise_problems(SUBJECT, found)


def trained_dtype(module: nn.Module) -> torch.dtype:
    """The dtype in which gradients accumulate by default here: bfloat16 if all trained parameters
    have it, else float32."""
    dtypes = {param.dtype for param in module.parameters() if param.requires_grad}
    if dtypes == {torch.bfloat16}:
        return torch.bfloat16
    return torch.float32


def mark_shards(engine: UserLoopEngine, module: nn.Module, shown_by: nn.Module) -> None:
    """Marks the parameters of `engine` for optimizers and checkpoints. State dicts of `module`, and
    of modules in it, show them from now on. `shown_by`, the module that users have, and modules in
    it refuse conversions."""
    for pair in engine.pairs:
        mark_shard(pair)
        pair.sharded._fsdp_engine = weakref.ref(engine)  # type: ignore[attr-defined]
    register_state_dict_hooks(module, engine)
    refuse_conversions(shown_by, engine)
    watch_steps()
