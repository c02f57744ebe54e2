"""Weights in Transformer Engine's quantized classes, as the engine sees them.

Nothing here imports Transformer Engine: its objects are known by the names of their classes and of
their fields, so that this package can be imported, and tested, where there is none.
"""

from .params import (
    TransformerEngineParams,
    attributes_of_class,
    dequantized,
    format_of,
    memory_of,
    scales_of,
    stored_in,
)

__all__ = [
    "TransformerEngineParams",
    "attributes_of_class",
    "dequantized",
    "format_of",
    "memory_of",
    "scales_of",
    "stored_in",
]
