"""Checkpoints of one format from those of another: `fsdp_dtensor`, `torch_dist`, Hugging Face.

On one process, of files that may be larger than memory. May enter: a format's names and files.
"""

from megatron_fsdp_adapter.checkpoint.convert.conversion import (
    FORMATS,
    Options,
    Report,
    convert,
    detect_format,
)

__all__ = ["FORMATS", "Options", "Report", "convert", "detect_format"]
