"""The groups of ranks, and the search for a wrapper."""

from megatron_fsdp_adapter.plain.megatron_fsdp import find_megatron_fsdp as find_megatron_fsdp

from .fully_shard import *  # noqa: F403
