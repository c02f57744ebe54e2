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
    """Replaces Megatron's FSDP wrapper by this package's in every imported module.

    It also replaces parts of Megatron's optimizer and of its checkpoints that read the wrapper.
    Call it before or after Megatron's modules are imported. A later call replaces the names of
    modules that were imported in between. The runner (`python -m megatron_fsdp_adapter`) and
    `apply_fsdp_overrides` call it.

    Examples:
        >>> install()
        >>> from megatron.core.distributed import FullyShardedDataParallel as found
        >>> found is FullyShardedDataParallel
        True

    Raises:
        RuntimeError: this release of megatron-core is not supported. The message lists all names
            that it lacks, and nothing is replaced.
    """
    # Imported late: it imports megatron.core, which importing this module must not.
    from megatron_fsdp_adapter.megatron.compat.core_support import require_supported_core

    require_supported_core(ALL)
    patches.install(ALL)


def uninstall() -> None:
    """Restores every name that `install` has replaced. Existing wrappers do not change.

    Examples:
        >>> install()
        >>> uninstall()
        >>> from megatron.core.distributed import FullyShardedDataParallel as found
        >>> found is FullyShardedDataParallel
        False
    """
    patches.uninstall(ALL)
