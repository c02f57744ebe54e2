"""Lifetime of our functions in Megatron (`compat/table.py`): from `install()` until `uninstall()`.
A wrapper that is constructed without it needs those of the optimizer as well; they stay for as long
as such a wrapper lives."""

from __future__ import annotations

import weakref
from typing import Any

from megatron.core import optimizer as core_optimizer

from .compat import patches
from .compat.table import LATE, OPTIMIZER, installed

_LIVING = "__megatron_fsdp_adapter_wrappers__"
"""An attribute of core's optimizer package: the wrappers that want the functions there."""


def install_while_alive(wrapper: Any) -> bool:
    """Installs the optimizer's patches until `wrapper` is garbage, unless something else needs them
    longer. Returns whether `install()` was called: then also in what was imported since."""
    vars(core_optimizer).setdefault(_LIVING, weakref.WeakSet()).add(wrapper)
    weakref.finalize(wrapper, _release).atexit = False
    patches.install(OPTIMIZER)
    if installed():
        patches.install(LATE)
    return installed()


def _release() -> None:
    """A wrapper is gone."""
    if not list(vars(core_optimizer)[_LIVING]) and not installed():
        patches.uninstall(OPTIMIZER)
