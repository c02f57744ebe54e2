"""Megatron-Bridge's conversion of a live sharded model's weights from and to Hugging Face.

Megatron-Bridge goes through a list of tasks, one for each parameter, and expects the parameters of
plain data parallelism. Its methods are wrapped so that it finds these. Modules show their ordinary
parameters. In an export the tensor of a task is gathered over the data-parallel ranks when its turn
comes; in a load the tensor takes over this rank's rows of what is written to it (`ModuleWeight`).
A rank gathers only tensors of tasks that are under way. Megatron-Bridge itself handles tensor,
pipeline and expert parallelism.

From 0.6 on it has its own path for DTensors. It is not used, because it assumes that every tensor
with a DTensor is whole over tensor-parallel ranks and known on this pipeline stage only, writes
tensors of other shapes, and does not see adapters.

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


# `_load`, `_tasks`, `_stream`, `_adapters`, `_tied` and `_fp8_tasks` replace methods of
# Megatron-Bridge (`compat/table.py`).


def engines_of(models: Any) -> list[FsdpEngine]:
    """The engines of the sharded parameters in `models`: a module or a list of modules, wrapped or
    parts of wrapped ones."""
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
    """The arguments of a call of `original`, the models among them, and the engines of sharded
    models. If there are engines, the models in the arguments are replaced by those inside all
    wrappers."""
    call = inspect.signature(original).bind(*args, **kwargs)
    models = _listed(call.arguments["megatron_model"])
    engines = engines_of(models)
    if engines:
        call.arguments["megatron_model"] = [_innermost(model) for model in models]
    return call, models, engines


def _show_raw(engines: Iterable[FsdpEngine]) -> None:
    """Makes modules hold their ordinary parameters, of which Megatron-Bridge reads shapes, dtypes
    and devices. RuntimeError if the main weights' memory was released."""
    for engine in engines:
        check_here(engine.away, "converting weights", [MAIN_WEIGHTS])
        engine.to_unsharded()


@contextmanager
def ordinary_parameters(engines: Iterable[FsdpEngine]) -> Iterator[None]:
    """A context in which modules hold their ordinary parameters. These have no memory between
    steps."""
    sharded = [engine for engine in engines if not engine.switch.shows_unsharded]
    _show_raw(engines)
    try:
        yield
    finally:
        for engine in sharded:
            engine.show_between_passes()


def _load(original: Original, /, *args: Any, **kwargs: Any) -> Any:
    """Loads weights from Hugging Face into the main weights; returns the models that were given."""
    call, models, engines = _bound(original, args, kwargs)
    if not engines:
        with values_follow(models):
            return original(*args, **kwargs)
    bridge = args[0]
    instead: dict[str, Any] = {TASKS: functools.partial(_receiving, getattr(bridge, TASKS))}
    if hasattr(bridge, "export_weight_dtype"):
        # For "fp8" it keeps all weights that it has converted, for main weights that begin with
        # their values.
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
    """The tasks of a load, with tensors that write to this rank's rows of the main weights.
    build: Megatron-Bridge's function that makes the tasks."""
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
    """A context in which `owner` itself has these attributes."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(before)


def _tasks(original: Original, /, *args: Any, **kwargs: Any) -> Any:
    """The tasks, made while modules hold their ordinary parameters."""
    call, _, engines = _bound(original, args, kwargs)
    with ordinary_parameters(engines):
        return original(*call.args, **call.kwargs)


def _stream(original: Original, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """The weights of an export, from tasks whose tensors are gathered one after the other."""
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
    """Tasks whose tensors are gathered over data-parallel ranks when a task is taken from the
    sequence. To take one is collective: all ranks take the same tasks in the same order."""

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
    """Makes the weights of adapters from tasks whose tensors were gathered."""
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
    """Gives later pipeline stages' copies of a tied embedding the first stage's values."""
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
    """RuntimeError for sharded models; Megatron-Bridge's result for others."""
    _, _, engines = _bound(original, args, kwargs)
    if engines:
        raise RuntimeError(
            "export_weight_dtype='fp8': this conversion does not gather the sharded bytes and "
            "scales of weights. Leave it at 'bf16'"
        )
    return original(*args, **kwargs)
