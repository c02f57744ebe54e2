"""What is wrong with the arguments of the wrapper, beside options: module, units, groups.

Each function returns one line for each problem, so that the wrapper can raise all at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

PARALLEL_SIZES: Mapping[str, str] = {
    # attribute of ProcessGroupCollection -> field of the model config
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}


def module_problems(
    module: nn.Module,
    unit_classes: Sequence[type[nn.Module]] | None,
    device: torch.device | str | None,
) -> list[str]:
    """Problems of the model, of the unit classes named for it, and of the device asked for."""
    return [
        *_compiled(module),
        *_untrainable(module),
        *_units_that_match_nothing(module, unit_classes or ()),
        *_devices(module, device),
    ]


def _compiled(module: nn.Module) -> list[str]:
    return [
        f"module {name or type(child).__name__}: it was compiled with torch.compile, and a "
        "compiled graph does not see that gathering changes storage; wrap the original module"
        for name, child in module.named_modules()
        if isinstance(child, torch._dynamo.OptimizedModule)
    ]


def _untrainable(module: nn.Module) -> list[str]:
    if any(param.requires_grad for param in module.parameters()):
        return []
    return [
        f"module={type(module).__name__} has no trainable parameter: nothing can be sharded or "
        "trained; set requires_grad on at least one parameter, or do not wrap the module"
    ]


def _units_that_match_nothing(
    module: nn.Module, unit_classes: Sequence[type[nn.Module]]
) -> list[str]:
    return [
        f"fsdp_unit_modules={[named.__name__ for named in unit_classes]}: no module of "
        f"{type(module).__name__} is a {unit_class.__name__}; name a class that the model "
        "contains, or leave the argument out for the transformer layers"
        for unit_class in unit_classes
        if not any(isinstance(child, unit_class) for child in module.modules())
    ]


def device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter; the CPU if there is none."""
    return next((param.device for param in module.parameters()), torch.device("cpu"))


def _devices(module: nn.Module, device: torch.device | str | None) -> list[str]:
    devices = sorted({str(param.device) for param in module.parameters()})
    if len(devices) > 1:
        return [
            f"module: its parameters are on several devices {devices}; move it to one before "
            "wrapping it"
        ]
    if device is not None and devices and torch.device(device) != device_of(module):
        return [
            f"device={device}: the module's parameters are on {devices[0]}; move the module there "
            "before wrapping it, or leave the argument out"
        ]
    return []


def parallel_sizes(pg_collection: Any | None) -> dict[str, int]:
    """Sizes of the groups of `PARALLEL_SIZES` that exist, in the collection or in
    `parallel_state`."""
    if pg_collection is not None:
        groups: dict[str, Any] = {
            name: getattr(pg_collection, name, None) for name in PARALLEL_SIZES
        }
        return {name: group.size() for name, group in groups.items() if hasattr(group, "size")}
    if not parallel_state.model_parallel_is_initialized():
        return {}
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


def group_problems(config: Any, sizes: Mapping[str, int]) -> list[str]:
    """Groups whose size is not what the model config says. Sharding over the ranks that are left
    would train, and give every rank of the other axes weights of its own."""
    return [
        f"{option}={getattr(config, option, 1)}, but the {name} process group has {sizes[name]} "
        "ranks: initialise the groups with the sizes of the model config"
        for name, option in PARALLEL_SIZES.items()
        if name in sizes and sizes[name] != getattr(config, option, 1)
    ]
