"""Megatron-Bridge's conversion of a live model's weights from and to Hugging Face, when sharded.

Megatron-Bridge goes through a list of tasks, one for each parameter, and knows what a parameter
under plain data parallelism is. Its methods are wrapped, so that it finds just that: modules show
their ordinary parameters, and the tensor of a task is gathered over the data-parallel ranks when
its turn comes, or takes over this rank's rows of what is written to it (`ModuleWeight`). No rank
ever holds more of the model. Tensor, pipeline and expert parallelism stay Megatron-Bridge's.

From 0.6 on it has a path for DTensors of its own, which is not used: it takes every tensor with a
DTensor beside it for whole over tensor-parallel ranks, on this pipeline stage alone, writes what
has another shape, and does not see adapters. 0.3 has none.

Nothing is imported: Megatron-Bridge is used if it is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from megatron_fsdp_adapter.build.shard_attributes import engines_behind
from megatron_fsdp_adapter.core.engine.buffer import MAIN_WEIGHTS, check_here
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.megatron.compat.patches import Original
from megatron_fsdp_adapter.megatron.compat.table import CONVERSION
from megatron_fsdp_adapter.quantized.scaling import scalings_of
from megatron_fsdp_adapter.quantized.start import values_follow
from megatron_fsdp_adapter.state.module_weights import (
    copy_from_first_stage,
    module_weights,
    shared_embeddings,
)

TASKS = "build_conversion_tasks"


# In the place of methods of Megatron-Bridge (`compat/table.py`): from `_load` on.


def engines_of(models: Any) -> list[FsdpEngine]:
    """The engines of what is sharded among `models`: a module or a list, wrapped or any part of
    what was."""
    return engines_behind(param for model in _listed(models) for param in model.parameters())


def _listed(models: Any) -> list[nn.Module]:
    return list(models) if isinstance(models, list | tuple) else [models]


def _innermost(model: nn.Module) -> nn.Module:
    """The module inside all wrappers."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def _bound(
    original: Original, args: Any, kwargs: Any
) -> tuple[inspect.BoundArguments, list[nn.Module], list[FsdpEngine]]:
    """The arguments of a call of `original`, the models among them, and the engines of those that
    are sharded. With such, wrappers around the models are taken off in the arguments."""
    call = inspect.signature(original).bind(*args, **kwargs)
    models = _listed(call.arguments["megatron_model"])
    engines = engines_of(models)
    if engines:
        call.arguments["megatron_model"] = [_innermost(model) for model in models]
    return call, models, engines


def _show_raw(engines: Iterable[FsdpEngine]) -> None:
    """Modules hold their ordinary parameters: mappings look at shapes, dtypes and devices.
    RuntimeError if the main weights' memory was released."""
    for engine in engines:
        check_here(engine.away, "converting weights", [MAIN_WEIGHTS])
        engine.to_unsharded()


@contextmanager
def ordinary_parameters(engines: Iterable[FsdpEngine]) -> Iterator[None]:
    """Inside, modules hold their ordinary parameters, which have no memory between steps."""
    sharded = [engine for engine in engines if not engine.switch.shows_unsharded]
    _show_raw(engines)
    try:
        yield
    finally:
        for engine in sharded:
            engine.show_between_passes()


def _load(original: Original, /, *args: Any, **kwargs: Any) -> Any:
    call, models, engines = _bound(original, args, kwargs)
    if not engines:
        with values_follow(models):
            return original(*args, **kwargs)
    bridge = args[0]
    instead: dict[str, Any] = {TASKS: functools.partial(_receiving, getattr(bridge, TASKS))}
    if hasattr(bridge, "export_weight_dtype"):
        # Of "fp8" it keeps all that it has converted, for main weights that begin as that.
        instead["export_weight_dtype"] = "bf16"
    with _instead(bridge, instead):
        original(*call.args, **call.kwargs)
    for engine in engines:
        engine.to_sharded()
        for scaling in scalings_of(engine.pairs):
            scaling.forget()
        engine.main_weights_changed(loaded=True)
    return models


def _receiving(build: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """The tasks of a load: what is copied into a tensor of one goes to this rank's rows."""
    tasks = build(*args, **kwargs)
    engines = engines_behind(_tensors(tasks))
    _show_raw(engines)
    weights = module_weights(engines)
    received = []
    for task in tasks:
        weight = None if task is None else weights.get(id(task.param_weight))
        if weight is not None:
            task = dataclasses.replace(task, param_weight=weight)
        received.append(task)
    return received


def _tensors(tasks: Iterable[Any]) -> list[Any]:
    return [task.param_weight for task in tasks if task is not None]


@contextmanager
def _instead(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, `owner` itself has these attributes."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(before)


def _tasks(original: Original, /, *args: Any, **kwargs: Any) -> Any:
    call, _, engines = _bound(original, args, kwargs)
    with ordinary_parameters(engines):
        return original(*call.args, **call.kwargs)


def _stream(original: Original, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
    call, _, engines = _bound(original, args, kwargs)
    given = call.arguments
    if not engines:
        yield from original(*args, **kwargs)
        return
    if given.get("conversion_tasks") is None:
        build = getattr(args[0], TASKS)
        wanted = {}
        if "weight_dtype" in given:
            wanted["weight_dtype"] = given.pop("weight_dtype")
        given["conversion_tasks"] = build(given["hf_pretrained"], given["megatron_model"], **wanted)
    given["conversion_tasks"] = _Gathered(given["conversion_tasks"], engines)
    with ordinary_parameters(engines):
        yield from original(*call.args, **call.kwargs)


class _Gathered(Sequence[Any]):
    """Tasks whose tensors are gathered over data-parallel ranks, one after the other, when they are
    asked for: always the same ones on all ranks, in one order."""

    def __init__(self, tasks: Sequence[Any], engines: Sequence[FsdpEngine]) -> None:
        self.tasks = tasks
        self.engines = engines
        self.weights = module_weights(engines)  # by the id of the module's tensor

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        return self._whole(self.tasks[index])

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._whole, self.tasks)

    def _whole(self, task: Any) -> Any:
        # The reader of the weights may have trained, or saved, in between.
        _show_raw(self.engines)
        weight = None if task is None else self.weights.get(id(task.param_weight))
        if weight is None:
            return task
        dtype = weight.dtype  # the module's, as without sharding
        if getattr(task, "weight_dtype", None) == torch.float32:
            dtype = torch.float32  # all that the main weights have
        return dataclasses.replace(task, param_weight=weight.gather(dtype))


def _adapters(original: Original, bridge: Any, /, adapter_tasks: Iterable[Any]) -> Any:
    parts = ("linear_in_task", "linear_out_task")
    tasks = list(adapter_tasks)
    engines = engines_behind(_tensors(getattr(task, part) for task in tasks for part in parts))
    weights = module_weights(engines)
    _show_raw(engines)

    def whole(part: Any) -> Any:
        weight = weights.get(id(part.param_weight))
        if weight is None:
            return part
        return dataclasses.replace(part, param_weight=weight.gather())

    gathered = []
    for task in tasks:
        changes = {part: whole(getattr(task, part)) for part in parts}
        gathered.append(dataclasses.replace(task, **changes))
    return original(bridge, gathered)


def _tied(original: Original, /, *args: Any, **kwargs: Any) -> Any:
    """The copies of a tied embedding that later pipeline stages have become that of the first."""
    call, _, engines = _bound(original, args, kwargs)
    if not engines:
        return original(*args, **kwargs)
    shared = shared_embeddings(engines)
    if shared:
        find = getattr(sys.modules[CONVERSION], "_get_embedding_group", None)
        if find is None:
            group = parallel_state.get_embedding_group()
        else:
            group = find(call.arguments["megatron_model"])
        copy_from_first_stage(shared, group)
    return None


def _fp8_tasks(original: Original, /, *args: Any, **kwargs: Any) -> Any:
    _, _, engines = _bound(original, args, kwargs)
    if engines:
        raise RuntimeError(
            "export_weight_dtype='fp8': this conversion does not gather the sharded bytes and "
            "scales of weights. Leave it at 'bf16'"
        )
    return original(*args, **kwargs)
