"""The helpers for DTensors with uneven rows."""

from megatron_fsdp_adapter.plain.uneven_dtensor import *  # noqa: F403
