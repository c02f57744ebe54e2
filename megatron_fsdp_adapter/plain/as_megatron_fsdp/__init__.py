"""A folder for PYTHONPATH, whose package `megatron_fsdp` has the names of NVIDIA's and gives ours;
and the function that imports it without that."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from ..megatron_fsdp import MegatronFSDP

NAME = "megatron_fsdp"


def use_as_megatron_fsdp() -> None:
    """Makes `import megatron_fsdp` import this package's module of that name, and its submodules.

    It has the names of NVIDIA's package `megatron-fsdp`. A second call does nothing.

    Examples:
        >>> use_as_megatron_fsdp()
        >>> from megatron_fsdp import MegatronFSDP
        >>> MegatronFSDP.__module__
        'megatron_fsdp_adapter.plain.megatron_fsdp'

    Raises:
        RuntimeError: NVIDIA's `megatron_fsdp` was imported before. Parts of the program may hold
            its classes.
    """
    present = sys.modules.get(NAME)
    if present is not None and getattr(present, "MegatronFSDP", None) is not MegatronFSDP:
        raise RuntimeError(
            f"use_as_megatron_fsdp: {NAME} was imported already, from "
            f"{getattr(present, '__file__', None)}. Call it before anything imports {NAME}"
        )
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    try:
        importlib.import_module(NAME)
    finally:
        sys.path.remove(folder)
