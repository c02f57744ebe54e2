"""Putting our wrapper in the places where Megatron holds its own.

Megatron and the frameworks on top of it import their FSDP class, and the helpers of their
checkpoint code, by name, and test models with isinstance against what they imported. So a name is
rebound in the module that defines it, for imports still to come, and then wherever an already
loaded megatron module holds the same object, tuples of classes included. A fixed list of modules
would miss some: Bridge and Megatron-LM bind them in different places in every release.

While installed, Megatron's bundled engine cannot be used in this process: its own code calls
helpers that now are ours, so constructing its wrapper is an error. That error shows a name that was
out of reach, or else the first step does (`wiring.py`). `uninstall()` puts everything back.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_fsdp_adapter.megatron.checkpoint import megatron_names, megatron_saves
from megatron_fsdp_adapter.megatron.seams import patches
from megatron_fsdp_adapter.megatron.seams.rebound import FSDP, ORIGINALS, WRAPPER
from megatron_fsdp_adapter.megatron.seams.table import (
    BASE_WEIGHTS,
    BRIDGE_WEIGHTS,
    DRIVERS,
    FUSED_WGRAD,
    OPTIMIZER,
)

_ENGINE = f"{FSDP}.src.megatron_fsdp"
_CONSTRUCTOR = "__megatron_fsdp_adapter_constructor__"


@dataclass(frozen=True)
class Rebinding:
    """One name of Megatron's that install() gives another meaning.

    module, name: where Megatron defines it; replacement: returns ours; everywhere: also rebind it
    in every loaded megatron module that holds the same object; required: its absence means a
    Megatron that we do not support (else it is skipped: that version has no such helper); refused:
    a class that cannot be constructed meanwhile; makers: modules that construct it and keep the
    original, so that it is that error.
    """

    module: str
    name: str
    replacement: Callable[[], object]
    everywhere: bool = True
    required: bool = False
    refused: bool = False
    makers: tuple[str, ...] = ()


def _wrapper_class() -> object:
    # Imported late: adapter imports megatron.core, and importing install must not.
    from megatron_fsdp_adapter.megatron.adapter import FullyShardedDataParallel

    return FullyShardedDataParallel


def _inner_class() -> object:
    from megatron_fsdp_adapter.megatron.inner import ShardedModule

    return ShardedModule


def _ddp_config_class() -> object:
    from megatron_fsdp_adapter.megatron.options.ddp_config import DistributedDataParallelConfig

    return DistributedDataParallelConfig


def _clip_qk() -> object:
    from megatron_fsdp_adapter.megatron.qk_clip import clip_qk

    return clip_qk


def _ours(name: str) -> Callable[[], object]:
    return lambda: getattr(megatron_names, name)


def _helper(module: str, name: str) -> Rebinding:
    return Rebinding(f"{_ENGINE}.{module}", name, _ours(name))


REBINDINGS: tuple[Rebinding, ...] = (
    Rebinding(
        WRAPPER,
        "FullyShardedDataParallel",
        _wrapper_class,
        required=True,
        refused=True,
    ),
    # Megatron-LM main has two wrappers, and FullyShardedDataParallel is a function that picks one.
    # Its V2 is left alone: that function alone makes one, and core's optimizer goes another way for
    # what is one.
    Rebinding(
        WRAPPER, "FullyShardedDataParallelV1", _wrapper_class, refused=True
    ),
    # Megatron-Bridge unwraps models down to it before it converts their weights.
    Rebinding(
        f"{_ENGINE}.megatron_fsdp",
        "MegatronFSDP",
        _inner_class,
        refused=True,
        makers=(f"{_ENGINE}.fully_shard",),
    ),
    Rebinding(
        "megatron.core.distributed.distributed_data_parallel_config",
        "DistributedDataParallelConfig",
        _ddp_config_class,
    ),
    # It looks for layers two levels below a wrapper; ours has one level more.
    Rebinding("megatron.core.optimizer.qk_clip", "clip_qk", _clip_qk),
    _helper("uneven_dtensor", "preprocess_state_dict_for_uneven_dtensor"),
    _helper("uneven_dtensor", "gather_uneven_dtensor_to_full_tensor"),
    _helper("uneven_dtensor", "redistribute_uneven_dtensor_to_replicated"),  # from 0.18 on
    _helper("uneven_dtensor", "uneven_dtensor_to_full_tensor"),  # likewise
    _helper("param_and_grad_buffer", "make_fsdp_dtensor"),
    _helper("utils", "is_mcore_tensor_model_parallel"),
    _helper("utils", "get_mcore_tensor_parallel_partition_dim"),
    # Only in the SwiGLU split: layers use this function for their own, other purpose.
    Rebinding(
        "megatron.core.transformer.fsdp_dtensor_checkpoint",
        "copy_tensor_model_parallel_attributes",
        _ours("copy_tensor_model_parallel_attributes"),
        everywhere=False,
    ),
)


def install() -> None:
    """Makes Megatron use this package's FSDP wrapper, optimizer seam and checkpoint helpers, save
    safely (`megatron_saves.py`), and fuse weight gradients where apex is missing.

    May be called before or after Megatron's modules are imported, and any number of times: a
    later call also reaches names that were bound to the originals in between. Raises
    RuntimeError, before anything is changed, for a megatron-core that is not supported, and with
    every name that it lacks.
    """
    # Imported late: these import megatron.core, and importing install must not.
    from megatron_fsdp_adapter.megatron import supported

    supported.require_supported_core(_missing_for_installation)
    patches.install(OPTIMIZER)
    patches.install((*FUSED_WGRAD, *BRIDGE_WEIGHTS, *BASE_WEIGHTS, *DRIVERS))
    for rebinding in REBINDINGS:
        module = _module_of(rebinding)
        if module is None:
            continue
        originals = vars(module).setdefault(ORIGINALS, {})
        original = originals.setdefault(rebinding.name, getattr(module, rebinding.name))
        _rebind(rebinding, module, original, rebinding.replacement())
        if rebinding.refused:
            _refuse_construction(original)
    megatron_saves.install()


def uninstall() -> None:
    """Gives every name that `install()` rebound its original meaning. Harmless when not installed.

    Wrappers that were already constructed stay what they are.
    """
    megatron_saves.uninstall()
    for rebinding in reversed(REBINDINGS):
        module = sys.modules.get(rebinding.module)
        originals = vars(module).get(ORIGINALS, {}) if module is not None else {}
        if module is None or rebinding.name not in originals:
            continue
        original = originals.pop(rebinding.name)
        _rebind(rebinding, module, rebinding.replacement(), original)
        if rebinding.refused:
            _allow_construction(original)
        if not originals:
            delattr(module, ORIGINALS)
    patches.uninstall(OPTIMIZER)
    patches.uninstall((*FUSED_WGRAD, *BRIDGE_WEIGHTS, *BASE_WEIGHTS, *DRIVERS))


def places() -> dict[str, list[str]]:
    """Where each rebound name is ours now: dotted paths by name. Empty when not installed."""
    found: dict[str, list[str]] = {}
    for rebinding in REBINDINGS:
        module = sys.modules.get(rebinding.module)
        if module is None or rebinding.name not in vars(module).get(ORIGINALS, {}):
            continue
        ours = rebinding.replacement()
        found[rebinding.name] = sorted(
            f"{holder.__name__}.{name}"
            for holder in _loaded_megatron_modules()
            for name, value in vars(holder).items()
            if _replace(value, ours, None) is not value
        )
    return found


def absent() -> list[str]:
    """Names of `REBINDINGS` that this Megatron does not have, as dotted paths."""
    return [
        f"{rebinding.module}.{rebinding.name}"
        for rebinding in REBINDINGS
        if _module_of(rebinding) is None
    ]


def original(name: str) -> Any:
    """Megatron's own object under a name that is rebound now. Raises KeyError if none is."""
    for rebinding in REBINDINGS:
        module = sys.modules.get(rebinding.module)
        if rebinding.name == name and module is not None and ORIGINALS in vars(module):
            return vars(module)[ORIGINALS][name]
    raise KeyError(f"{name} is not rebound")


def missing_names(rebindings: Iterable[Rebinding] = REBINDINGS) -> list[str]:
    """Names without which there is nothing to rebind, as dotted paths."""
    return [
        f"{rebinding.module}.{rebinding.name}"
        for rebinding in rebindings
        if rebinding.required and _module_of(rebinding) is None
    ]


def _missing_for_installation() -> list[str]:
    return [
        *missing_names(),
        *patches.missing((*DRIVERS, *BRIDGE_WEIGHTS, *BASE_WEIGHTS)),
        *megatron_saves.missing(),
    ]


def _module_of(rebinding: Rebinding) -> ModuleType | None:
    """The defining module, imported; None if this Megatron has no such module or name."""
    try:
        module = importlib.import_module(rebinding.module)
    except ModuleNotFoundError as error:
        # Another package that is missing is the user's trouble, and theirs to see.
        if error.name is None or not _is_megatron(error.name):
            raise
        return None
    return module if hasattr(module, rebinding.name) else None


def _rebind(rebinding: Rebinding, module: ModuleType, old: object, new: object) -> None:
    setattr(module, rebinding.name, new)
    if rebinding.everywhere:
        rebind_everywhere(old, new, rebinding.makers)


def rebind_everywhere(old: object, new: object, but_in: Iterable[str] = ()) -> None:
    """Puts `new` wherever a loaded megatron module holds `old`, inside tuples too; not in the
    modules that `but_in` names."""
    for holder in _loaded_megatron_modules():
        if holder.__name__ in but_in:
            continue
        for name, value in list(vars(holder).items()):
            replaced = _replace(value, old, new)
            if replaced is not value:
                setattr(holder, name, replaced)


def _refuse_construction(original: Any) -> None:
    """Makes the constructor of Megatron's class an error. A module outside megatron may have
    imported it: training would go on with an engine whose helpers are no longer its own."""
    if not isinstance(original, type) or _CONSTRUCTOR in vars(original):
        return

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"{original.__module__}.{original.__name__} was constructed while "
            "megatron_fsdp_adapter is installed: either by Megatron's own fully_shard(), or by a "
            "module that had imported the class before install() and is not one of megatron's; "
            "call install() before that is imported, or uninstall() to use Megatron's own wrapper"
        )

    setattr(original, _CONSTRUCTOR, vars(original)["__init__"])
    setattr(original, "__init__", __init__)  # noqa: B010 (mypy refuses the assignment)


def _allow_construction(original: Any) -> None:
    if isinstance(original, type) and _CONSTRUCTOR in vars(original):
        setattr(original, "__init__", vars(original)[_CONSTRUCTOR])  # noqa: B010
        delattr(original, _CONSTRUCTOR)


def _replace(value: Any, old: object, new: object) -> Any:
    """`new` for `old`, a tuple with `old` in it rebuilt, and anything else as it is."""
    if value is old:
        return new
    if type(value) is tuple:
        entries = tuple(_replace(entry, old, new) for entry in value)
        unchanged = all(a is b for a, b in zip(entries, value, strict=True))
        return value if unchanged else entries
    return value


def _loaded_megatron_modules() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if _is_megatron(name) and isinstance(module, ModuleType):
            yield module


def _is_megatron(name: str) -> bool:
    return name == "megatron" or name.startswith("megatron.")
