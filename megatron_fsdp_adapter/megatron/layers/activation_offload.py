"""Offload of activations that core does inside of units (`fine_grained_activation_offloading`).

Its hooks on saved tensors are set while a module of a layer runs, on top of the engine's filter
(`core/engine/hooks.py`). Before 0.19 it copies whatever is large enough, and marks
parameters to be left, which views of them do not inherit. So its question is answered here.
`cpu_offloading` sets its hooks around whole layers, where the filter replaces them.
"""

from __future__ import annotations

from typing import Any

from ...core.engine.buffer import is_owned
from ..compat.patches import Original

FINE_GRAINED = "fine_grained_activation_offloading"


def _is_to_be_offloaded(original: Original, self: Any, tensor: Any) -> bool:
    return not is_owned(tensor) and original(self, tensor)
