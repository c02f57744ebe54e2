"""A folder for PYTHONPATH, whose package `megatron_fsdp` has the names of NVIDIA's and gives ours;
and the function that imports it without that."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from ..megatron_fsdp import MegatronFSDP

NAME = "megatron_fsdp"


def use_as_megatron_fsdp() -> None:
    """Makes `import megatron_fsdp`, and that of its modules, give ours from now on. Called twice,
    it does nothing. RuntimeError if another one was imported before, whose classes the program may
    have by now."""
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
