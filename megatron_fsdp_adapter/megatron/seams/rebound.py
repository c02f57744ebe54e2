"""Which of Megatron's names are ours now: the mark that `install()` leaves where it rebinds one."""

from __future__ import annotations

import sys

FSDP = "megatron.core.distributed.fsdp"
WRAPPER = f"{FSDP}.mcore_fsdp_adapter"
"""Where core defines its FSDP wrapper."""

ORIGINALS = "__megatron_fsdp_adapter_originals__"
"""An attribute of a module of Megatron: by name, the objects that are rebound in it."""


def installed() -> bool:
    """True between `install()` and `uninstall()`."""
    module = sys.modules.get(WRAPPER)
    return module is not None and bool(vars(module).get(ORIGINALS))
