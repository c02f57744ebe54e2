"""Gives its own place to what `use_as_megatron_fsdp` makes."""

import sys

from megatron_fsdp_adapter import use_as_megatron_fsdp

sys.modules.pop(__name__, None)
use_as_megatron_fsdp()
