"""CPU mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_fsdp_adapter.launch.cpu_mode import VIEWS, disable_cpu_mode, enable_cpu_mode
from megatron_fsdp_adapter.megatron.compat import patches


def cpu_mode_enabled() -> bool:
    """Whether CPU mode is on in this process."""
    return patches.is_installed(VIEWS[0])


@contextmanager
def cpu_mode_inside() -> Iterator[None]:
    """CPU mode inside. If it was on before, it stays on."""
    was_on = cpu_mode_enabled()
    enable_cpu_mode()
    try:
        yield
    finally:
        if not was_on:
            disable_cpu_mode()
