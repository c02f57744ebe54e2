"""Installs our wrapper, optimizer seam and checkpoint helpers under Megatron's names.

The replacements are a table (`megatron/compat/table.py`). While they are installed, Megatron's
bundled engine cannot be used in this process: it would call our helpers, so constructing its
wrapper raises. If some reference to Megatron's own could not be rebound, this error shows it, or
the first step does (`megatron/wrapper/no_sync_check.py`).
"""

from __future__ import annotations

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import ALL


def install() -> None:
    """Rebinds Megatron's names to this package's FSDP wrapper, optimizer seam, checkpoint helpers,
    safe saves (`megatron_saves.py`), and fused weight gradients without apex.

    May be called before or after Megatron's modules are imported, and any number of times. A later
    call also rebinds names that were bound to the originals in between, in any loaded module.

    Raises:
        RuntimeError: megatron-core is not supported. Nothing is changed then; the message lists
            every missing name.
    """
    # Imported late: it imports megatron.core, which importing this module must not.
    from megatron_fsdp_adapter.megatron.compat.core_support import require_supported_core

    require_supported_core(ALL)
    patches.install(ALL)


def uninstall() -> None:
    """Restores every name that `install()` rebound. No-op if not installed.

    Wrappers that were constructed before are not changed.
    """
    patches.uninstall(ALL)
