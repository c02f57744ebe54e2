"""Numbers of the format of `blocks`."""

from __future__ import annotations

BLOCK, ALIGNMENT = 32, 16
"""Elements of a block; bytes of which a row is a multiple."""

LARGEST_FINITE = 0x7F7FFFFF
"""Bits of a float32."""

NOT_FINITE = 255
"""The byte in the place of a scale: as the exponent of a float32, infinity."""


def row_bytes(numel: int) -> int:
    """Of a row that carries so many elements."""
    return -(-(numel + -(-numel // BLOCK)) // ALIGNMENT) * ALIGNMENT
