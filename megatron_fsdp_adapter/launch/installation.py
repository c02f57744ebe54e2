"""Putting our wrapper, and all that goes with it, in the places where Megatron holds its own.

What is replaced is a table (`megatron/compat/table.py`). While installed, Megatron's bundled engine
cannot be used in this process: its own code calls helpers that now are ours, so constructing its
wrapper is an error. That error shows a name that was out of reach, or else the first step does
(`megatron/no_sync_check.py`).
"""

from __future__ import annotations

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import ALL


def install() -> None:
    """Makes Megatron use this package's FSDP wrapper, optimizer seam and checkpoint helpers, save
    safely (`megatron_saves.py`), and fuse weight gradients where apex is missing.

    May be called before or after Megatron's modules are imported, and any number of times: a
    later call also reaches names that were bound to the originals in between, in any loaded module.
    Raises RuntimeError, before anything is changed, for a megatron-core that is not supported, and
    with every name that it lacks.
    """
    # Imported late: it imports megatron.core, and importing install must not.
    from megatron_fsdp_adapter.megatron.core_support import require_supported_core

    require_supported_core(ALL)
    patches.install(ALL)


def uninstall() -> None:
    """Gives every name that `install()` rebound its original meaning. Harmless when not installed.

    Wrappers that were already constructed stay what they are.
    """
    patches.uninstall(ALL)
