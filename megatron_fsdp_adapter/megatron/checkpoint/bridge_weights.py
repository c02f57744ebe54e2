"""Megatron-Bridge's conversion of a live model's weights from and to Hugging Face, when sharded.

From 0.6 on Megatron-Bridge itself writes into, and gathers, the DTensors that a sharded model shows
as its parameters. Ours are of the kind that it expects, but it takes what the modules hold, and
after a forward pass that is gathered weights: a load would change those alone, for one step. So its
methods are wrapped: before they look, the model shows its optimizer parameters, and weights that
are kept count as outdated after a load. Adapters (LoRA) it would not gather at all.

Nothing is imported: Megatron-Bridge is used if it is loaded. Releases that know no DTensors are an
error, when a sharded model is converted.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.uneven_dtensor import whole_tensor
from megatron_fsdp_adapter.megatron.seams.wrapped import unwrap, wrap
from megatron_fsdp_adapter.quantised.start import values_follow
from megatron_fsdp_adapter.sharding.sharded_module import forget_scalings

MODULE = "megatron.bridge.models.conversion.model_bridge"
CLASS = "MegatronModelBridge"
LOAD, TASKS, STREAM = (
    "load_weights_hf_to_megatron", "build_conversion_tasks", "stream_weights_megatron_to_hf"
)  # fmt: skip
ADAPTERS = "materialize_adapter_weights"


def missing() -> list[str]:
    """Methods that are wrapped and that the Megatron-Bridge which is loaded does not have."""
    module = sys.modules.get(MODULE)
    if module is None:
        return []
    owner = getattr(module, CLASS, None)
    return [f"{MODULE}.{CLASS}.{name}" for name in _WRAPPERS if not hasattr(owner, name)]


def install() -> None:
    """Wraps the methods if Megatron-Bridge is loaded. Idempotent; called again when a wrapper is
    made. `missing` says what it needs."""
    module = sys.modules.get(MODULE)
    if module is None:
        return
    owner = getattr(module, CLASS)
    for name, ours in _WRAPPERS.items():
        wrap(owner, name, functools.partial(ours, module))


def uninstall() -> None:
    """Gives Megatron-Bridge its own methods back. Harmless when not installed."""
    owner = getattr(sys.modules.get(MODULE), CLASS, None)
    for name in _WRAPPERS:
        unwrap(owner, name)


def engines_of(models: Any) -> list[FsdpEngine]:
    """Of what is sharded among `models`: a module or a list, wrapped or any part of what was."""
    given = models if isinstance(models, list | tuple) else [models]
    params = [param for model in given for param in model.parameters()]
    refs = [getattr(param, "_fsdp_engine", None) for param in params]
    found = {id(engine): engine for ref in refs if ref is not None and (engine := ref())}
    return list(found.values())


def _models(original: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    given = inspect.signature(original).bind(*args, **kwargs).arguments["megatron_model"]
    return list(given) if isinstance(given, list | tuple) else [given]


def _shown(
    module: ModuleType, original: Callable[..., Any], args: Any, kwargs: Any
) -> list[FsdpEngine]:
    """The engines of the model that `original` was called for, which show optimizer parameters."""
    engines = engines_of(_models(original, args, kwargs))
    if engines and not hasattr(module, "DTensor"):
        raise RuntimeError(
            f"{original.__name__}: this Megatron-Bridge does not know sharded weights, which 0.6 "
            "and later releases do; use one of those, load weights before the model is wrapped, or "
            "convert a checkpoint: python -m megatron_fsdp_adapter convert"
        )
    for engine in engines:
        engine.show_optimizer_params()
    return engines


def _load(
    module: ModuleType, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    engines = _shown(module, original, args, kwargs)
    with values_follow(_models(original, args, kwargs)):
        result = original(*args, **kwargs)
    for engine in engines:
        forget_scalings(engine)
        engine.main_weights_changed(loaded=True)
    return result


def _tasks(
    module: ModuleType, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    _shown(module, original, args, kwargs)
    return original(*args, **kwargs)


def _stream(
    module: ModuleType, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Iterator[Any]:
    _shown(module, original, args, kwargs)
    yield from original(*args, **kwargs)


def _adapters(
    module: ModuleType, original: Callable[..., Any], bridge: Any, /, adapter_tasks: Iterable[Any]
) -> Any:
    return original(bridge, [_whole_adapter(task) for task in adapter_tasks])


_WRAPPERS: dict[str, Callable[..., Any]] = {
    LOAD: _load, TASKS: _tasks, STREAM: _stream, ADAPTERS: _adapters
}  # fmt: skip
"""By the method that is wrapped: called with the module, the original and the call's arguments."""


def _whole_adapter(task: Any) -> Any:
    """The task of an adapter with whole weights in the place of sharded ones. Collective."""
    parts = {name: getattr(task, name) for name in ("linear_in_task", "linear_out_task")}
    sharded = [n for n, part in parts.items() if isinstance(part.param_weight, DTensor)]
    if any(parts[n].mapping.tp_size > 1 for n in sharded) and task.requires_expert_splits:
        raise RuntimeError(
            f"{task.global_base_prefix}: adapters of grouped experts that tensor parallelism "
            "splits cannot be exported from a sharded model; use expert_tensor_parallel_size=1"
        )
    whole = {
        n: dataclasses.replace(parts[n], param_weight=whole_tensor(parts[n].param_weight))
        for n in sharded
    }
    return dataclasses.replace(task, **whole) if whole else task
