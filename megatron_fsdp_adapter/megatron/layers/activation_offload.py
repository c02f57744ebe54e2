"""Core's offload of activations inside of units (`fine_grained_activation_offloading`).

While a module of a layer runs, core sets hooks on saved tensors on top of the engine's filter
(`core/engine/hooks.py`). Before 0.19 these offload any tensor that is large enough, except
parameters, which have a mark. Views of parameters do not inherit the mark: so core's check is
replaced here. `cpu_offloading` needs nothing: it sets its hooks around whole layers, where the
filter replaces them.
"""

from __future__ import annotations

from typing import Any

from ...core.engine.buffer import is_owned
from ..compat.patches import Original

FINE_GRAINED = "fine_grained_activation_offloading"


def _is_to_be_offloaded(original: Original, self: Any, tensor: Any) -> bool:
    """False for tensors in the engine's memory; core's answer for others."""
    return not is_owned(tensor) and original(self, tensor)
