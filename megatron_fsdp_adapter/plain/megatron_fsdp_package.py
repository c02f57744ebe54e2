"""`import megatron_fsdp` as ours: for programs and libraries that have that import."""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import megatron_fsdp as api
from . import uneven_dtensor

NAME, VERSION = "megatron_fsdp", "0.6.1"
OURS = "_of_fsdp_adapter"
"""Mark of a module that is one of these."""


def use_as_megatron_fsdp() -> None:
    """Makes `import megatron_fsdp`, and that of its modules, give ours from now on. Called twice,
    it does nothing. RuntimeError if another one was imported before, whose classes the program may
    have by now."""
    present = sys.modules.get(NAME)
    if present is not None and hasattr(present, OURS):
        return
    if present is not None:
        raise RuntimeError(
            f"use_as_megatron_fsdp: {NAME} was imported already, from "
            f"{getattr(present, '__file__', None)}. Call it before anything imports {NAME}"
        )
    contents = _contents()
    whole = {**contents["fully_shard"], **contents["package_info"]}  # functions, not modules
    for name, values in {"": whole, **contents}.items():
        module = ModuleType(f"{NAME}.{name}".rstrip("."), "Of megatron_fsdp_adapter.")
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=not name)
        if not name:
            module.__path__ = []  # a package, with no modules but these
        module.__dict__.update({**values, OURS: True, "__getattr__": _late(module.__name__)})
        sys.modules[module.__name__] = module


def _contents() -> dict[str, dict[str, Any]]:
    """Module of the package -> its names and their values."""
    functions = ("fully_shard", "fully_shard_model", "fully_shard_optimizer", "ShardingStrategy")
    classes = ("MegatronFSDP", "MixedPrecisionPolicy", "FSDPDistributedIndex")
    own = {name: getattr(api, name) for name in (*functions, *classes)}
    uneven = vars(uneven_dtensor).items()
    return {
        "fully_shard": own,
        "megatron_fsdp": own,
        "uneven_dtensor": {name: value for name, value in uneven if not name.startswith("_")},
        "utils": {**own, "find_megatron_fsdp": api.find_megatron_fsdp},
        "mixed_precision": {
            "MixedPrecisionPolicy": api.MixedPrecisionPolicy,
            "get_quantized_model_init_context_cls": get_quantized_model_init_context_cls,
        },
        "distributed_data_parallel_config": {},
        "package_info": {
            "__package_name__": NAME, "__version__": VERSION, "__shortversion__": VERSION,
        },
    }  # fmt: skip


def _late(place: str) -> Any:
    """`__getattr__` of a module: the config of Megatron's DDP, which takes megatron-core to import,
    and modules of a package."""

    def find(name: str) -> Any:
        if name == "DistributedDataParallelConfig":
            return getattr(importlib.import_module(__name__.partition(".")[0]), name)
        if f"{place}.{name}" in sys.modules:
            return sys.modules[f"{place}.{name}"]
        raise AttributeError(f"module {place!r}, of megatron_fsdp_adapter, has no {name!r}")

    return find


def get_quantized_model_init_context_cls() -> Any:
    """Transformer Engine's context for quantized parameters. RuntimeError without one."""
    with contextlib.suppress(ImportError):
        engine = importlib.import_module("transformer_engine.pytorch")
        for name in ("quantized_model_init", "fp8_model_init"):
            if hasattr(engine, name):
                return getattr(engine, name)
    raise RuntimeError(
        "get_quantized_model_init_context_cls: transformer_engine.pytorch cannot be imported or "
        "has no quantized_model_init. Install Transformer Engine, or build the model without it"
    )
