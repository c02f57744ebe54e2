"""Conversion of checkpoints between `fsdp_dtensor` and `torch_dist`.

Runs in one process, on files that may be larger than memory. Code for the names and files of a
format belongs here.
"""

from megatron_fsdp_adapter.checkpoint.convert.conversion import FORMATS, convert
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import detect_format

__all__ = ["FORMATS", "convert", "detect_format"]
